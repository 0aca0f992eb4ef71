"""Exact solver of the placement problem: where to cut, and on which devices, for the highest throughput.

The problem. Cut both towers into n stages and put each stage on a pool of devices, for the most items per second. A cut
is the pair (vision layers, text layers) before it, and a stage leads from one cut to a later one, so a placement is a
path of n steps from (0, 0) to the two depths, each step with a pool. At a throughput r a stage uses devices of its pool
(whole ones, or a power-of-two share of one), core-seconds and memory of the host; uses add up along the path, resource
by resource (`capacities`). A throughput is feasible if some path keeps every sum within its capacity: a shortest path
problem with resource constraints.

Why bisection is exact. Each use grows with r, so what is feasible at r is feasible below it. `throughput_search` raises
a feasible rate and lowers an infeasible one until they meet (to 1e-9); the exact rate of the path found is then
computed (`Resources.best_rate`).

The bound. Let p be prices >= 0 of the resources, which sum to 1 for all capacities together. A path within every
capacity costs at most 1; so if the cheapest path costs more than 1, no path is feasible (Lagrangian relaxation, weak
duality). `feasibility` repeatedly raises the price of what the cheapest path overuses; this decides most rates, by a
path or by a proof. The same prices show which steps lie on no path of cost <= 1; these are dropped without loss
(`feasibility.narrow_steps`, and on whole grids `bounds.GridAt.open_steps`).

The rest is solved by labels (`label_setting`), the beginnings of paths. A label is dropped only if another at the same
cut is as good in every resource, or if the minimum that the rest of the path uses no longer fits. Both rules keep an
optimal path, so the answer is exact however weak the bound was. Ties are broken by the same method with an additive
rank: fewer stages that lack a tower, fewer bytes over the cuts, more even stages.

Coarse to fine. Cuts at every few layers are searched first, then those near the best, then all: a rate that a coarse
grid reaches is a lower bound for the fine one, at which few steps stay open. The last round always includes all cuts.

Complexity. With A x B cuts (about layers^2) and P pools there are about (A B)^2 P / 4 steps; the cheapest path over the
grid takes O(n A^2 B^2) vectorised operations, without listing the steps. Label setting is exponential in the worst case
(the problem is NP-hard); in practice some thousand steps stay open: a 48 + 24 layer model on three device types takes
about 0.2 s on one core.

Cores of several speeds. A stage on a pool with a `core_speed` uses core-seconds of that pool and, times the speed, of
all cores together; the work outside the stages uses any cores that are left, so it only lowers the second capacity.
Both uses add up and grow with the throughput, so nothing above changes.

Proof by test. `tests/shards/test_planning_search.py` compares 550 random problems (tight memory, shared cores, shares
of devices, cores of several speeds) with brute force over every cut, placement and throughput at which a use changes;
and 140 more for the tie break. The brute force follows the definitions and shares no code with the solver.

Modules: `capacities` uses and capacities; `grid` all stages as arrays; `bounds` cheapest paths over a grid;
`label_setting` paths over lists of steps; `feasibility` the prices, and one rate; `throughput_search` all rates, and
the preferred path.

Source: Handler and Zang 1980 (Lagrangian bounds for resource-constrained shortest paths); Desrochers and Soumis 1988
(label setting).
"""
