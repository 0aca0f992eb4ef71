"""Places of conditions by the names of cities: found in any language, distinguished by region, refused with a cure."""

import pytest

import embedder.installation
from embedder.errors import ConfigError
from embedder.retrieval import cities
from embedder.retrieval.cities import find_city, nearest_city
from embedder.retrieval.conditions import check_condition
from embedder.retrieval.hit import Hit, describe
from embedder.retrieval.hit_files import hit_table

COLUMNS = {"latitude": "DOUBLE", "longitude": "DOUBLE"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "country", "latitude"),
    [
        ("Lisbon", "pt", 38.7),
        ("lissabon", "pt", 38.7),
        ("北京", "cn", 39.9),
        ("Paris", "fr", 48.9),
        ("Paris, TX", "us", 33.7),
        ("paris , united states", "us", 33.7),
    ],
)
def test_a_city_is_found_by_its_name(name, country, latitude):
    city = find_city(name)
    assert city.regions[0] == country
    assert city.latitude == pytest.approx(latitude, abs=0.1)


def test_a_condition_gets_the_place_of_the_city():
    checked = check_condition("NOT within('Lisbon', 25)", COLUMNS)
    assert checked == "NOT within(latitude, longitude, 38.72509, -9.1498, 25)"
    with pytest.raises(ConfigError, match='called "x. OR 1"'):
        check_condition("within('x'' OR 1', 25)", COLUMNS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Lisbonn", r"no city of 15,000 inhabitants or more is called 'Lisbonn'; there are Libon, Lisbon, Lissone"),
        ("Paris, DE", r"there are Paris, FR, Paris, US"),
        ("", r"is called ''; give latitude and longitude"),
        ("\0\x1b[2J", r"is called .*; give latitude and longitude"),
    ],
)
def test_an_unknown_city_is_refused_with_those_that_there_are(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_city(name)
    assert "\x1b" not in str(caught.value)


def test_without_the_extra_the_message_names_it(monkeypatch):
    monkeypatch.setitem(embedder.installation.EXTRAS, "places", ("no_such_package",))
    embedder.installation.missing.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"pip install 'embedder\[places\]'; or give latitude and longitude"):
            find_city("Lisbon")
    finally:
        embedder.installation.missing.cache_clear()


@pytest.mark.parametrize(
    ("latitude", "longitude", "place"),
    [
        (38.7223, -9.1393, "Lisbon, PT"),
        (52.52, 13.405, "Berlin, DE"),
        (52.3989, 13.0657, "Potsdam, DE"),
        (38.6979, -9.4215, "Cascais, PT"),
        (-17.61, 177.45 - 360, "Lautoka, FJ"),
        (38.72, -30.0, None),  # in the Atlantic
        (90.0, 0.0, None),
        (0.0, 0.0, None),
        (float("nan"), 1.0, None),
        (None, 1.0, None),
    ],
)
def test_a_place_has_the_name_of_the_nearest_city(latitude, longitude, place):
    assert nearest_city(latitude, longitude) == place


def hit(**medium):
    return Hit(0.5, "a.jpg", 0, "image", "/a.jpg", None, None, "a caption", {}, medium=medium)


def test_hits_say_where_they_were_taken():
    found, other = hit(latitude=38.7223, longitude=-9.1393), hit(width=5)
    assert describe(found) == ["0.500  Lisbon, PT", "a caption", "a.jpg"]
    assert describe(other) == ["0.500", "a caption", "a.jpg"]
    assert hit_table([[found, other]], {})["place"].to_pylist() == ["Lisbon, PT", None]
    assert "place" not in hit_table([[other]], {}).column_names
    found.carryover["place"] = "at the sea"
    table = hit_table([[found]], {})
    assert (table["place"].to_pylist(), table["medium.place"].to_pylist()) == (["at the sea"], ["Lisbon, PT"])


def test_without_the_extra_places_have_no_names(monkeypatch):
    monkeypatch.setitem(embedder.installation.EXTRAS, "places", ("no_such_package",))
    for cached in (embedder.installation.missing, cities._city_points):
        cached.cache_clear()
    try:
        assert hit(latitude=38.7223, longitude=-9.1393).place is None
    finally:
        for cached in (embedder.installation.missing, cities._city_points):
            cached.cache_clear()
