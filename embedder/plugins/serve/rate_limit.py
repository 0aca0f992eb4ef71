"""Limit on the requests of each client: a token bucket for each address, in a table of bounded size."""

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache

MAX_CLIENTS = 10_000
IPV6_PREFIX = 64  # what one customer gets; each has more addresses than a table can hold


class RateLimit:
    """Token buckets by client: each holds up to `burst` requests, and is refilled at `rate_per_s`."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate_per_s, self._burst = rate_per_s, float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, now: float) -> float:
        """Take one request from the client's bucket; return 0, or the seconds until there is one.

        `now` is in seconds of a monotonic clock.
        """
        key = client_key(client)
        if key is None:
            return 0.0
        left, since = self._buckets.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate_per_s)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate_per_s
        self._buckets[key] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait

    @property
    def num_clients(self) -> int:
        """Clients in the table."""
        return len(self._buckets)


def is_among(client: str, places: Iterable[str]) -> bool:
    """Whether a client is one of some addresses and networks (10.0.0.0/8); `*` is any, other words are themselves."""
    return any(place in ("*", client) or _is_in(client, place) for place in places)


def _is_in(client: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(client) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


@lru_cache(maxsize=MAX_CLIENTS)
def client_key(client: str) -> str | None:
    """Address that is limited as one: an IPv6 network, or an IPv4 address; None for loopback, which is not limited."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client or None
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        if mapped is None and not address.is_loopback:
            return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
        address = mapped or address
    return None if address.is_loopback else str(address)
