"""What must not be published is not, and what is merely small or new is not held up."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import samples
import store_samples
from model_runs import changed_model
from store_samples import begin, publish_rows, row, table

from embedder.config import RunConfig, load_config
from embedder.errors import ConfigError, RunFailedError
from embedder.ingest.embed import embed
from embedder.ingest.guards import check_forced, force, judge, judge_retire, refusal
from embedder.ingest.run_result import count_run
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import CURRENT_FILE, read_current

LIMITS = RunConfig().limits
NUM_PAIRS, WIDTH = 300, 16


def unit_vectors(num, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(num, WIDTH)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def pair(name, image, text, **changes):
    sides = {"image_embedding": list(map(float, image)), "text_embedding": list(map(float, text))}
    words = {"modality": "pair", "caption": f"caption of {name}", "content_version": f"v-{name}"}
    return row(name, **words, **sides, **changes)


def matching_pairs(num=NUM_PAIRS, seed=0, prefix="p"):
    return [pair(f"{prefix}{number:04d}", vector, vector) for number, vector in enumerate(unit_vectors(num, seed))]


def shuffled_pairs(num=NUM_PAIRS, seed=0):
    vectors = unit_vectors(num, seed)
    order = np.random.default_rng(1).permutation(num)
    return [pair(f"p{number:04d}", vectors[number], vectors[order[number]]) for number in range(num)]


def result_of(run, num_items, num_rejected, published, retired=(), **options):
    """Result of a run by its journal, but for the numbers of items and rejects."""
    result = count_run(run, published, pa.chunked_array([retired], pa.string()), **options)
    return replace(result, num_items=num_items, num_rejected=num_rejected)


def result(files, *rows, retired=(), num_items=None, num_rejected=0, **options):
    """A run that has finished these rows and is not published."""
    run, stamp = begin(files)
    if rows:
        write_part(files, stamp, 0, table(*rows))
    return result_of(run, num_items or len(rows), num_rejected, read_current(files), retired, **options)


def verdicts(found, limits=LIMITS, forced=()):
    return {verdict.name: verdict for verdict in judge(found, limits, forced)}


def publish_figure(files, recall, num_pairs):
    """Write the retrieval figure into CURRENT.json, as a publication does."""
    current = read_current(files).model_copy(update={"retrieval": {"recall_at_10": recall, "num_pairs": num_pairs}})
    files.write(CURRENT_FILE, current.model_dump_json().encode())


def test_good_pairs_pass_all_guards_and_give_the_figure_to_publish(files):
    found = verdicts(result(files, *matching_pairs()))
    assert all(verdict.passed for verdict in found.values())
    assert (found["retrieval"].figure, found["retrieval"].num_judged) == (1.0, NUM_PAIRS)
    assert found["vectors"].figure == pytest.approx(1, abs=0.05), "random directions have a mean cosine of 0"


SAME, NOTHING = unit_vectors(1)[0], np.zeros(WIDTH)


@pytest.mark.parametrize(("image", "text"), [(None, SAME), (SAME, SAME), (NOTHING, None)])
def test_constant_vectors_are_not_published_and_each_tower_is_told(files, image, text):
    rows = [
        pair(f"p{number}", vector if image is None else image, vector if text is None else text)
        for number, vector in enumerate(unit_vectors(60))
    ]
    verdict = verdicts(result(files, *rows))["vectors"]
    assert not verdict.passed and verdict.blocks
    assert verdict.figure == pytest.approx(0, abs=1e-9)
    assert ("60 image vectors" in verdict.message, "60 text vectors" in verdict.message) == (
        image is not None,
        text is not None,
    )
    assert "min_vector_spread = 0.0001" in verdict.message and "embedder verify" in verdict.message


def test_vectors_on_one_line_are_not_published(files):
    direction, signs = unit_vectors(1)[0], np.random.default_rng(0).choice([-1, 1], 60)
    rows = [
        pair(f"p{number}", sign * direction, vector)
        for number, (sign, vector) in enumerate(zip(signs, unit_vectors(60), strict=True))
    ]
    verdict = verdicts(result(files, *rows))["vectors"]
    assert not verdict.passed
    assert verdict.figure == pytest.approx(1)
    assert "over 1 directions" in verdict.message and "min_vector_directions" in verdict.message


def test_few_vectors_are_never_judged(files):
    same = unit_vectors(1)[0]
    found = verdicts(result(files, *[pair(f"p{number}", same, same) for number in range(6)]))
    assert all(verdict.passed for verdict in found.values())
    assert found["vectors"].figure is None and found["retrieval"].figure is None


def test_one_caption_for_all_pictures_is_no_collapse(files):
    text = unit_vectors(1)[0]
    rows = [pair(f"p{number}", image, text) | {"caption": "a photo"} for number, image in enumerate(unit_vectors(100))]
    assert verdicts(result(files, *rows))["vectors"].passed


def test_shuffled_captions_are_not_published_where_they_once_were_right(files):
    publish_rows(files, *matching_pairs())
    publish_figure(files, 1.0, NUM_PAIRS)
    changed = [each | {"modified": "t1"} for each in shuffled_pairs()]
    verdict = verdicts(result(files, *changed))["retrieval"]
    assert not verdict.passed
    assert verdict.figure < 0.2
    assert verdict.limit == pytest.approx(0.75)
    assert "and 1.000 in what is published" in verdict.message
    assert refusal([verdict]).endswith("--force retrieval")


def test_forcing_one_guard_overrides_that_one_only(files):
    publish_rows(files, *matching_pairs())
    publish_figure(files, 1.0, NUM_PAIRS)
    same = unit_vectors(1)[0]
    collapsed = [pair(f"p{number:04d}", same, same, modified="t1") for number in range(NUM_PAIRS)]
    found = verdicts(result(files, *collapsed), forced=["retrieval"])
    assert found["retrieval"].forced and not found["retrieval"].passed and not found["retrieval"].blocks
    assert found["vectors"].blocks and not found["vectors"].forced
    assert not found["rejects"].forced, "what passes is not forced"


def test_all_guards_that_fail_are_told_at_once_with_one_option_each(files):
    publish_rows(files, *matching_pairs())
    publish_figure(files, 1.0, NUM_PAIRS)
    same = unit_vectors(1)[0]
    collapsed = [pair(f"p{number:04d}", same, same, modified="t1") for number in range(NUM_PAIRS)]
    broken = [store_samples.reject(f"b{number:03d}") for number in range(20)]
    found = result(files, *collapsed, *broken, num_items=320, num_rejected=20)
    message = refusal(judge(found, LIMITS))
    assert [message.count(f"guard {name}: ") for name in ("rejects", "vectors", "retrieval")] == [1, 1, 1]
    assert message.endswith("with --force rejects --force vectors --force retrieval")
    assert message.count("--force") == 3 and "\n" not in message
    rest = refusal(judge(found, LIMITS, ["vectors"]))
    assert "guard vectors" not in rest, "it is overridden"
    assert rest.endswith("with --force rejects --force vectors --force retrieval"), "the same command needs it again"
    assert refusal(judge(found, LIMITS, ["rejects", "vectors", "retrieval"])) is None


def test_the_rejects_guard_names_the_most_frequent_reasons_with_an_example_each(files):
    kinds = {"UnidentifiedImage": 7, "FileNotFound": 5, "TimedOut": 3, "TooLarge": 2, "Empty": 1}
    rows = [
        store_samples.reject(f"{kind}/{number}", error_type=kind, error=f"{kind} happened\nto number {number}")
        for kind, num in kinds.items()
        for number in range(num)
    ]
    message = verdicts(result(files, *rows, num_items=18, num_rejected=18))["rejects"].message
    assert (
        "7 x decode UnidentifiedImage (as UnidentifiedImage/0: UnidentifiedImage happened\\nto number 0), "
        "5 x decode FileNotFound (as FileNotFound/0: FileNotFound happened\\nto number 0), "
        "3 x decode TimedOut (as TimedOut/0: TimedOut happened\\nto number 0), 3 for 2 other reasons"
    ) in message


def test_ids_and_errors_of_any_length_leave_the_message_short(files):
    rows = [
        store_samples.reject(f"{number}" + 5_000 * "d/", error_type=f"Kind{number}", error=9_000 * "x \n")
        for number in range(50)
    ]
    message = refusal(judge(result(files, *rows, num_items=50, num_rejected=50), LIMITS))
    assert len(message) < 1_500 and "\n" not in message
    assert "47 for 47 other reasons" in message


def test_a_guard_that_does_not_exist_cannot_be_forced():
    with pytest.raises(ConfigError, match="--force retreival: there is no such guard; .*retrieval"):
        check_forced(["retreival"])


def test_the_state_to_be_published_is_judged_not_only_the_run(files):
    """Rows that stay, rows that are replaced, and rows that leave."""
    publish_rows(files, *matching_pairs(100))
    run_rows = [each | {"modified": "t1"} for each in matching_pairs(70, seed=3)[:20]]
    new = matching_pairs(40, seed=9, prefix="q")
    gone = [f"p{number:04d}" for number in range(90, 100)]
    found = verdicts(result(files, *run_rows, *new, retired=gone))["retrieval"]
    assert found.num_judged == 100 + 40 - 10
    assert found.figure == 1.0


def test_an_item_that_could_not_be_read_counts_with_its_old_vectors(files):
    publish_rows(files, *matching_pairs(100))
    broken = store_samples.reject("p0003", modified="t1")
    found = verdicts(result(files, broken, num_rejected=1))
    assert found["retrieval"].num_judged == 100


def test_touched_items_of_equal_content_count_with_the_vectors_that_they_keep(files):
    publish_rows(files, *matching_pairs(100))
    no_error = dict.fromkeys(("step", "error_type", "error", "transient"))
    known = {"modified": "t1", "known_vectors": 1, "unchanged": True}
    names = [f"p{number:04d}" for number in range(50)]
    rows = table(*[store_samples.reject(name, known_version=f"v-{name}", **known) | no_error for name in names])
    run, stamp = begin(files)
    write_part(files, stamp, 0, rows)
    write_part(files, stamp, 1, table(*matching_pairs(1, prefix="new")))
    found = verdicts(result_of(run, 51, 0, read_current(files)))
    assert found["retrieval"].num_judged == 101
    assert found["vectors"].figure is None, "only one vector is new"


def test_after_a_change_of_the_model_old_vectors_do_not_count(files):
    publish_rows(files, *matching_pairs(100))
    found = verdicts(result(files, *matching_pairs(80, seed=5), keeps_published=False))
    assert found["retrieval"].num_judged == 80


def test_rows_of_an_item_that_is_torn_do_not_count(files):
    pairs = matching_pairs(100)
    torn = [each | {"num_vectors": 2} for each in pairs[:5]]
    assert verdicts(result(files, *torn, *pairs[5:]))["retrieval"].num_judged == 95


def test_a_store_that_grows_is_compared_at_its_old_size(files):
    """Noisy pairs: the more pictures, the harder each is to find."""
    rng = np.random.default_rng(4)
    images = unit_vectors(2000)
    texts = images + 0.9 * rng.normal(size=images.shape).astype(np.float32)
    rows = [
        pair(f"p{number:04d}", image, text / np.linalg.norm(text))
        for number, (image, text) in enumerate(zip(images, texts, strict=True))
    ]
    small = verdicts(result(files, *rows[:200]))["retrieval"]
    publish_rows(files, *rows[:200])
    publish_figure(files, small.figure, small.num_judged)
    large = verdicts(result(files, *rows[200:]))["retrieval"]
    assert large.figure < 0.5 * small.figure, "of 2,000 pairs, far below that of 200"
    assert large.passed, "and yet nothing is wrong"
    assert large.num_judged == 2000


def test_a_first_publication_has_nothing_to_fall_below(files):
    assert verdicts(result(files, *shuffled_pairs()))["retrieval"].passed


def test_nothing_to_publish_is_not_judged_for_retrieval(files):
    publish_rows(files, *matching_pairs(100))
    assert set(verdicts(result(files))) == {"rejects", "vectors"}


@pytest.mark.parametrize(
    ("num_items", "num_rejected", "is_first", "passes"),
    [
        (50, 1, True, True),
        (12, 9, True, True),
        (12, 10, True, False),
        (5, 0, True, True),
        (1000, 10, True, True),
        (1000, 11, True, False),
        (3, 3, False, True),
        (100, 9, False, True),
        (100, 10, False, False),
        (0, 0, False, True),
    ],
)
def test_rejects_are_judged_by_their_share(files, num_items, num_rejected, is_first, passes):
    if not is_first:
        publish_rows(files, row("a"))
    found = verdicts(result(files, num_items=num_items, num_rejected=num_rejected))["rejects"]
    assert found.passed == passes
    if not passes:
        assert f"{num_rejected} of {num_items:,} item{'s' * (num_items != 1)} rejected" in found.message
        assert "embedder rejects --store" in found.message


@pytest.mark.parametrize(
    ("limits", "passes"),
    [({}, True), ({"min_rejects": 2}, False), ({"min_rejects": 3}, True), ({"max_reject_fraction": 0}, False)],
)
def test_how_few_rejects_stop_no_run_can_be_said(files, limits, passes):
    found = verdicts(result(files, num_items=50, num_rejected=2), load_config(overrides=limits).limits)["rejects"]
    assert (found.passed, found.figure) == (passes, 0.04)


@pytest.mark.parametrize(("num_rejected", "is_first", "passes"), [(1, True, False), (0, True, False), (1, False, True)])
def test_a_first_run_that_embeds_nothing_is_refused_however_few_its_files_are(files, num_rejected, is_first, passes):
    if not is_first:
        publish_rows(files, row("a"))
    gone = row("b", modality=None, num_vectors=0, step="decode", error_type="OtherFile", error="no picture")
    found = result(files, gone, num_rejected=num_rejected)
    found = verdicts(replace(found, num_items=num_rejected))["rejects"]
    assert found.passed == passes
    if not passes:
        assert found.message.startswith("1 of 1 item rejected" if num_rejected else "0 of 1 file could be")


@pytest.mark.parametrize(
    ("published", "gone", "figure", "passes"),
    [
        ({"": 100}, {"": 5}, 0.05, True),
        ({"": 100}, {"": 6}, 0.06, False),
        ({"": 100}, {}, 0.0, True),
        ({}, {}, 0.0, True),
        ({"": 1}, {"": 1}, 1.0, False),
        ({"small": 10, "large": 990}, {"small": 10}, 1.0, False),
        ({"a": 1000, "b": 1000}, {"a": 30, "b": 30}, 0.03, True),
        ({"left the file": 5, "b": 1000}, {"left the file": 5}, 1.0, False),
    ],
)
def test_a_source_that_lost_too_much_is_refused(published, gone, figure, passes):
    verdict = judge_retire(published, gone, 0.05)
    assert (verdict.passed, verdict.figure) == (passes, pytest.approx(figure))
    if not passes:
        assert "--force retire" in refusal([verdict]) and "mounted" in verdict.message
        assert force(verdict, ["retire"]).forced


def test_the_source_that_lost_its_items_is_named():
    message = judge_retire({"small": 10, "large": 990}, {"small": 9}, 0.05).message
    assert message.startswith("source small: 9 of 10 published items not listed")


@pytest.mark.medium
def test_nan_weights_reject_every_item(make_run, tmp_path, tiny_model):
    def broken(name, value):
        return np.full_like(value, np.nan) if "blocks.1" in name else value

    model = changed_model(tiny_model, tmp_path / "broken", broken)
    source = samples.folder(tmp_path / "in", num_images=40, captions=False)
    with pytest.raises(RunFailedError, match="guard rejects: 40 of 40 items rejected"):
        embed(make_run(source, model=str(model)))
