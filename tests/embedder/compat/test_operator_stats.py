"""Names of a run's operators, by which the display and the report distinguish stages from further models."""

from embedder.compat.operator_readings import _names

STAGE, MODELS, DECODE, WRITE = "MapBatches(StageActor)", "MapBatches(ModelActor)", "MapBatches(decode)", "Write"


def names(*middle):
    return _names([(DECODE, False), *middle, (WRITE, False)])


def test_stages_are_numbered_apart_from_the_actors_of_further_models():
    found = names((MODELS, True), (MODELS, True), (STAGE, True), (STAGE, True))
    assert found == ["decode", "models 0", "models 1", "stage 0", "stage 1", "write"]


def test_a_step_without_actors_is_no_stage_that_others_wait_for():
    assert names((MODELS, True), ("MapBatches(without_vectors)", False)) == [
        "decode",
        "models 0",
        "no vectors",
        "write",
    ]
