"""The reference of keys: all of them, from the fields."""

from embedder.config import RunConfig
from embedder.config_toml.config_reference import kinds_of, sections_of
from embedder.config_toml.fields import tables_below
from embedder.plugins.train.train_config import TrainConfig


def keys_of(sections, heading):
    (section,) = (section for section in sections if section.heading == heading)
    return {key.name: key for key in section.keys}


def test_every_key_has_a_type_and_a_meaning():
    sections = [*sections_of(RunConfig), *sections_of(TrainConfig)]
    keys = [(section.heading, key.name, key.type, key.meaning) for section in sections for key in section.keys]
    assert len(keys) == sum(
        len(table.kind.model_fields) for kind in (RunConfig, TrainConfig) for table in tables_below(kind)
    )
    assert [key for key in keys if not all(key[1:])] == []
    assert [section.heading for section in sections if not section.summary] == []


def test_types_defaults_and_units_are_in_words_of_toml():
    sections = sections_of(RunConfig)
    decode, top, stage = (keys_of(sections, heading) for heading in ("[decode]", "", "[[stage]]"))
    found = [(key.type, key.default, key.unit) for key in (decode["timeout_s"], decode["memory_bytes"], top["dtype"])]
    assert found == [
        ("number, > 0", "30", "seconds"),
        ("integer, >= 268_435_456", "4_294_967_296", "bytes"),
        ('"auto" or "float32" or "bfloat16" or "float16" or "int8"', '"auto"', ""),
    ]
    assert decode["items_per_task"].type == 'integer or "auto", >= 1'
    assert (top["num_stages"].default, top["max_reject_fraction"].unit) == ("3, or the number of [[stage]]", "share")
    assert (top["source"].type, top["source"].table, top["prices"].type) == (
        "tables",
        "[[source]]",
        "table of numbers, >= 0",
    )
    assert (stage["replicas"].type, stage["replicas"].table) == ('table or "auto"', "[stage.replicas]")
    assert keys_of(sections, "[[source]]")["path"].default == "required"


def test_families_of_towers_stand_beside_each_other_and_one_is_the_default():
    sections = sections_of(TrainConfig, known=kinds_of(RunConfig))
    visions = {section.family: section.is_default for section in sections if section.heading == "[architecture.vision]"}
    assert len(visions) >= 3 and [family for family, is_default in visions.items() if is_default] == ["vit"]
    assert {"[decode]", "[[source]]"} & {section.heading for section in sections} == set()
