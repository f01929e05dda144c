"""Decoding: threads only where it takes time and none that stay, one error for one record, names that last."""

import functools
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from loader import Field
from loader.sources import decoding
from loader.sources.decoding import (
    check_decoders,
    check_threads,
    decode_column,
    each,
    name_of,
)

BYTE = Field(np.dtype(np.uint8), (2,))


def where(place: int) -> str:
    return f"file f, row {place}"


def two_bytes(value: bytes, **_: Any) -> Any:
    return np.frombuffer(value, np.uint8)


def slow(value: Any) -> Any:
    time.sleep(0.002)
    return two_bytes(value)


def test_cheap_decoding_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_ALONE_SECONDS", 3600)  # however slow this machine is
    seen = set()

    def decode(value: bytes) -> Any:
        seen.add(threading.get_ident())
        return two_bytes(value)

    values = [bytes([i, i]) for i in range(5)]
    found = decode_column("x", decode, BYTE, values, where, threads=4)
    assert found.tolist() == [[i, i] for i in range(5)]
    assert seen == {threading.get_ident()}


def test_slow_decoding_uses_threads_and_leaves_none() -> None:
    before = threading.active_count()
    together = threading.Barrier(3, timeout=60)
    alone = iter([True])

    def decode(value: bytes) -> Any:
        # The first one takes longer than what is decoded alone; the others need each other.
        if next(alone, False):
            time.sleep(0.002)
        else:
            together.wait()
        return two_bytes(value)

    values = [bytes([i, i]) for i in range(7)]
    found = decode_column("x", decode, BYTE, values, where, threads=3)
    assert found.tolist() == [[i, i] for i in range(7)]
    assert threading.active_count() == before


def test_one_thread_is_the_calling_one() -> None:
    seen = []
    each(lambda number: seen.append((number, threading.get_ident())), 5, 1)
    assert seen == [(number, threading.get_ident()) for number in range(5)]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_record_that_fails_is_named(threads: int) -> None:
    def decode(value: bytes) -> Any:
        if value in (b"\x03\x03", b"\x08\x08"):
            raise KeyError("lost")
        return slow(value)

    values = [bytes([i, i]) for i in range(12)]
    with pytest.raises(
        ValueError,
        match=r"file f, row 3: column 'x' cannot be decoded by .*decode: KeyError: 'lost'",
    ):
        decode_column("x", decode, BYTE, values, where, threads)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.zeros(3, np.uint8), r"row 1: field 'x' is uint8\[3\], and .* say uint8\[2\]"),
        (np.zeros(2, np.int8), r"row 1: field 'x' is int8\[2\]"),
        (None, r"row 1: field 'x' is object\[\]"),
    ],
)
def test_a_value_that_is_not_like_the_others_is_named(value: Any, named: str) -> None:
    given = {b"ok": np.zeros(2, np.uint8), b"no": value}
    with pytest.raises(ValueError, match=named):
        decode_column("x", given.__getitem__, BYTE, [b"ok", b"no"], where, 1)


def test_a_string_may_be_narrower_than_its_field_and_no_wider() -> None:
    field = Field(np.dtype("U3"))
    found = decode_column("x", bytes.decode, field, [b"a", b"abc", b""], where, 1)
    assert found.tolist() == ["a", "abc", ""]
    with pytest.raises(ValueError, match=r"row 1: field 'x' is <U4"):
        decode_column("x", bytes.decode, field, [b"a", b"abcd"], where, 1)


class Callable:
    version = 7

    def __call__(self, value: Any) -> Any:
        return value


def test_a_function_is_known_by_its_name_arguments_and_version() -> None:
    assert name_of(two_bytes) == "two_bytes"
    assert (
        name_of(functools.partial(two_bytes, b"x", shape=(1, 2))) == "two_bytes(b'x', shape=[1, 2])"
    )
    assert name_of(Callable()) == "Callable version 7"
    assert name_of(functools.partial(Callable(), 1)) == "Callable(1) version 7"
    assert name_of(functools.partial(two_bytes, then=slow)) == "two_bytes(then=slow)"
    assert name_of(functools.partial(slow, np.arange(3))) == name_of(
        functools.partial(slow, np.arange(3))
    )
    assert name_of(functools.partial(slow, np.arange(3))) != name_of(
        functools.partial(slow, np.arange(4))
    )


def test_an_argument_that_cannot_be_recognised_is_refused() -> None:
    with pytest.raises(TypeError, match=r"could not be recognised at a resume"):
        name_of(functools.partial(two_bytes, then=object()))


def test_threads_are_one_for_each_core_or_as_asked() -> None:
    assert check_threads(None) >= 1
    assert check_threads(3) == 3
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"threads must be at least 1"):
            check_threads(wrong)
    for odd in (True, 1.5, "2"):
        value: Any = odd
        with pytest.raises(TypeError, match=r"threads must be an integer"):
            check_threads(value)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: check_decoders({"b": two_bytes}, ["a"]), "decode names 'b', and there is 'a'"),
        (lambda: check_decoders({"a": "png"}, ["a"]), "decode must map names to functions"),
        (lambda: check_decoders(two_bytes, ["a"]), "decode must map names to functions"),
        (
            lambda: check_decoders({"a": functools.partial(two_bytes, then=object())}, ["a"]),
            "could not be recognised at a resume",
        ),
    ],
    ids=itertools.count(),
)
def test_what_names_nothing_is_refused(call: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        call()
