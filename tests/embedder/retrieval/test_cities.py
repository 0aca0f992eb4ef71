"""Places of conditions by the names of cities: found in any language, told apart by region, refused with a cure."""

import pytest

import embedder.installation
from embedder.errors import ConfigError
from embedder.retrieval.cities import find_city
from embedder.retrieval.conditions import check_condition

COLUMNS = {"latitude": "DOUBLE", "longitude": "DOUBLE"}


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
