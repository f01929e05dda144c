"""The manifest: what it says, that any change of it shows, and that a stranger's does no harm."""

import copy
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loader
import loader.streams.pipeline
from checkpointing import manifest as manifests
from checkpointing.manifest import (
    MAX_MANIFEST_BYTES,
    Identity,
    Manifest,
    package_versions,
    seal,
)
from checkpointing.train_state import describe
from loader import Fingerprint, Pipeline, PipelineConfig, Position
from loader.identity.base import Place
from loader.stream import NEXT_IDS, ids_ahead, next_ids

STATE = {"w": np.zeros((2, 3), np.float32), "step": 3}
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(), parts, max_size=3),
    max_leaves=8,
)


def double(batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    return {"x": batch["x"] * 2}


def triple(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] * 3}


class Scale:
    def __init__(self, version: Any = None) -> None:
        if version is not None:
            self.version = version

    def __call__(self, *given: Any, **_: Any) -> dict[str, Any]:
        return {"x": given[-1]["x"]}


class Endless:
    """A source of any number of records, which come from their row numbers."""

    def __init__(self, num_records: int, name: str = "{}") -> None:
        self._len, self._name = num_records, name

    def __len__(self) -> int:
        return self._len

    @property
    def fields(self) -> dict[str, loader.Field]:
        return {"x": loader.Field(np.dtype(np.int64))}

    def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
        return rows if self._name == "{}" else np.array([self._name.format(row) for row in rows])

    def read(self, rows: npt.NDArray[np.int64], /) -> dict[str, npt.NDArray[Any]]:
        return {"x": rows}

    def fingerprint(self) -> Fingerprint:
        if self._len <= 1 << 20:
            return loader.fingerprint(self)
        return Fingerprint.of_revision("2026-01", self)


def a_pipeline(num_records: int = 20, **settings: Any) -> Pipeline:
    source = loader.ArraySource({"x": np.arange(num_records), "y": np.zeros((num_records, 2))})
    chosen: dict[str, Any] = {"batch_size": 3, "seed": 1, "final_batch": "pad", "num_epochs": 2}
    return Pipeline(source, PipelineConfig(**{**chosen, **settings}), double)


def a_manifest(pipeline: Pipeline, step: int = 3, **run_config: Any) -> Manifest:
    position = pipeline.position(step)
    return Manifest(
        step,
        Place(position, ids_ahead(pipeline, position)),
        Identity.of(pipeline, run_config, describe(STATE)),
        ({"position": {"epoch": 0, "offset": 3, "step": 1}, "changed": {"batch_size": [4, 3]}},),
        package_versions(),
        {"iterator/metadata": {"sha256": "0" * 64, "bytes": 37}},
    )


PIPELINE = a_pipeline()
WHOLE = a_manifest(PIPELINE, lr=0.1, name="é", layers=[1, 2], nothing=None)


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value] if isinstance(value, list) else {"a": value}
    return value


def plain() -> dict[str, Any]:
    return copy.deepcopy(WHOLE.to_dict())


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert Manifest.from_bytes(WHOLE.to_bytes()) == WHOLE


def test_any_byte_changed_anywhere_shows() -> None:
    data = bytearray(WHOLE.to_bytes())
    for i in range(len(data)):
        for flip in (1, 0x20, 0x80):
            data[i] ^= flip
            with pytest.raises(ValueError, match="the manifest"):
                Manifest.from_bytes(bytes(data))
            data[i] ^= flip
    assert Manifest.from_bytes(bytes(data)) == WHOLE


def test_any_cut_and_any_addition_shows() -> None:
    data = WHOLE.to_bytes()
    for length in range(len(data)):
        with pytest.raises(ValueError, match="the manifest"):
            Manifest.from_bytes(data[:length])
    for added in (b"\n", b" ", b"\0", b"{}"):
        for changed in (data + added, added + data):
            with pytest.raises(ValueError, match="the manifest"):
                Manifest.from_bytes(changed)


def test_the_same_values_in_another_spelling_show() -> None:
    value = json.loads(WHOLE.to_bytes())
    for text in (json.dumps(value), json.dumps(value, indent=1, sort_keys=True)):
        with pytest.raises(ValueError, match="does not match its own sha256"):
            Manifest.from_bytes(text.encode())
    twice = WHOLE.to_bytes().replace(b'"step":', b'"step":9,"step":')
    with pytest.raises(ValueError, match="does not match its own sha256"):
        Manifest.from_bytes(twice)


@pytest.mark.parametrize("version", [0, 2, -1, 1.0, True, "1", None, [1], "x" * 100_000])
def test_another_format_version_is_named(version: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the manifest has format .*this version reads 1"
    ) as caught:
        Manifest.from_bytes(seal({**plain(), "format": version}))
    assert len(str(caught.value)) < 200


STREAM: dict[str, Any] = plain()["stream"]
CONFIG: dict[str, Any] = STREAM["config"]
WRONG_STREAM: dict[str, list[Any]] = {
    "fingerprint": [{}, None, [], "sha256:" + "0" * 64],
    "config": [
        *({}, None, [], {"batch_size": 3}, {**CONFIG, "extra": 1}),
        *({**CONFIG, name: -1} for name in CONFIG),
        *({**CONFIG, name: {}} for name in CONFIG),
    ],
    "order": [
        *({}, None, [], {"kind": "feistel"}, {"kind": "none", "version": 1}),
        *({"kind": "feistel", "version": version} for version in ("1", 1.0, True, None)),
    ],
    "transform": ["double", [], {"name": 1}, 3, {"name": None, "version": "1"}],
}
WRONG: dict[str, list[Any]] = {
    "step": [-1, 4, 3.0, True, "3", None, 2**63, 10**400, [3]],
    "position": [
        *({}, None, [0, 9, 3], "x", {"epoch": 0, "offset": 9}, {"step": 3}),
        *({"epoch": -1, "offset": 9, "step": 3}, {"epoch": 0, "offset": -9, "step": 3}),
        *({"epoch": 0.0, "offset": 9, "step": 3}, {"epoch": False, "offset": 9, "step": 3}),
        *({"epoch": 2**63, "offset": 9, "step": 3}, {"epoch": 0, "offset": "9", "step": 3}),
    ],
    "state": [nested([], 70)],
    "next": [
        *(
            {},
            None,
            [],
            "ids",
            {**plain()["next"], "kind": "none"},
            {**plain()["next"], "digest": 1},
        ),
        *({**plain()["next"], "ids": ids} for ids in (None, 3, [1.5], [True], [None], [[1]])),
    ],
    "stream": [
        *({}, None, [], "pipeline", {"kind": "pipeline"}, {"kind": 1}, {"kind": "mixture"}),
        *({"kind": "toy", "values": nested([], 70)}, {"kind": "chain"}),
        *({**STREAM, part: value} for part, values in WRONG_STREAM.items() for value in values),
    ],
    "run_config": [None, [], "x", 1, nested({}, 70)],
    "train_state": [None, 3, {"a": 1}, [{}], [None], "text", [{"path": "", "dtype": "int"}]],
    "history": [
        None,
        3,
        [1],
        ["x"],
        [None],
        [{"a": nested([], 70)}],
    ],
    "packages": [None, [], {"numpy": 2}, "numpy"],
    "files": [
        *(None, [], {"a": None}, {"a": {}}, {"a": {"sha256": "0" * 64}}),
        *({"a": {"sha256": "0" * 64, "bytes": size}} for size in (-1, 1.0, True, "1", None)),
        *(
            {"a": {"sha256": sha, "bytes": 1}}
            for sha in ("", "0" * 63, "G" * 64, "A" * 64, 1, None)
        ),
        {"a": {"sha256": "0" * 64, "bytes": 1, "more": 1}},
    ],
}


def test_wrong_values_are_listed_for_every_part() -> None:
    assert WRONG.keys() == plain().keys() - {"format"}
    assert WRONG_STREAM.keys() == STREAM.keys() - {"kind"}


@pytest.mark.parametrize(
    ("part", "value"), [(part, value) for part, values in WRONG.items() for value in values]
)
def test_a_part_of_the_wrong_kind_is_refused_though_the_digest_holds(part: str, value: Any) -> None:
    with pytest.raises(ValueError, match="the manifest lacks or mistypes a part") as caught:
        Manifest.from_bytes(seal({**plain(), part: value}))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("part", sorted(plain()))
def test_a_part_that_is_missing_is_refused_though_the_digest_holds(part: str) -> None:
    value = plain()
    del value[part]
    with pytest.raises(ValueError, match="the manifest"):
        Manifest.from_bytes(seal(value))


@given(
    data=st.binary(max_size=200)
    | st.text().map(str.encode)
    | json_values.map(json.dumps).map(str.encode)
)
def test_anything_else_is_refused_as_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="the manifest"):
        Manifest.from_bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every part of a JSON value."""
    found = [path] if path else []
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        found += places(part, (*path, key))
    return found


@given(place=st.sampled_from(places(plain())), value=json_values)
def test_a_stranger_can_put_anything_anywhere_and_gets_a_manifest_or_a_value_error(
    place: tuple[Any, ...], value: Any
) -> None:
    whole = plain()
    functools.reduce(lambda part, key: part[key], place[:-1], whole)[place[-1]] = value
    try:
        read = Manifest.from_bytes(seal(whole))
    except ValueError:
        return
    # What was let through is of the right types: it can be compared, and written again the same.
    assert Manifest.from_bytes(read.to_bytes()) == read
    for difference in read.identity.diff(WHOLE.identity):
        assert all(isinstance(text, str) for text in dataclasses.astuple(difference))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_of_any_depth_is_a_value_error(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    limit = sys.getrecursionlimit()
    for depth in (65, 500, *range(limit - 200, limit + 10), 100_000):
        inner = "1" if opening == "[" else "{}"
        deep = opening * depth + inner + closing * depth
        for text in (deep, f'{{"format":1,"run_config":{{"a":{deep}}}}}'):
            with pytest.raises(ValueError, match="the manifest"):
                Manifest.from_bytes(text.encode())


def test_numbers_of_any_length_are_a_value_error() -> None:
    for number in ("9" * 5000, "1e999999", "-" + "9" * 100_000, "NaN", "Infinity"):
        text = f'{{"format":1,"step":{number}}}'
        with pytest.raises(ValueError, match="the manifest"):
            Manifest.from_bytes(text.encode())


def test_a_manifest_that_could_not_be_read_again_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 100_000)
    assert len(a_manifest(PIPELINE, text="x" * 80_000).to_bytes()) > 80_000
    with pytest.raises(ValueError, match="100000 are allowed; make run_config smaller"):
        a_manifest(PIPELINE, text="x" * 100_000).to_bytes()
    assert MAX_MANIFEST_BYTES < 2**31


# What belongs to a stream's identity.


def differences(before: Identity, now: Identity) -> dict[str, tuple[str, str]]:
    found = before.diff(now)
    assert len({difference.name for difference in found}) == len(found)
    return {difference.name: (difference.checkpoint, difference.now) for difference in found}


def identity(pipeline: Pipeline = PIPELINE, state: Any = None, **run_config: Any) -> Identity:
    return Identity.of(pipeline, run_config, describe(STATE if state is None else state))


def test_an_identity_does_not_differ_from_itself_after_a_round_trip() -> None:
    read = Manifest.from_bytes(WHOLE.to_bytes()).identity
    assert differences(WHOLE.identity, read) == differences(read, WHOLE.identity) == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batch_size", 4),
        ("seed", 2),
        ("final_batch", "drop"),
        ("num_epochs", None),
        ("shuffle", "none"),
        ("on_bad_record", "mask"),
        ("skip", [[1, 2]]),
        ("exclude", [3]),
        ("record_keys", True),
    ],
)
def test_each_setting_of_the_stream_is_compared(setting: str, value: Any) -> None:
    before = PIPELINE.config.to_dict()[setting]
    assert differences(identity(), identity(a_pipeline(**{setting: value}))) == {
        setting: (str(before), str(value))
    }


def test_every_setting_is_in_the_list_above() -> None:
    marks: Any = vars(test_each_setting_of_the_stream_is_compared)["pytestmark"]
    assert {name for name, _ in marks[0].args[1]} == PIPELINE.config.to_dict().keys()


def test_the_keys_version_is_in_the_manifest_where_there_are_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keyed = a_manifest(a_pipeline(record_keys=True))
    assert keyed.to_dict()["stream"]["keys"] == {"version": 1}
    assert "keys" not in STREAM
    assert Manifest.from_bytes(keyed.to_bytes()) == keyed
    monkeypatch.setattr(loader.streams.pipeline, "KEYS_VERSION", 2)
    now = identity(a_pipeline(record_keys=True))
    assert differences(keyed.identity, now)["keys_version"] == ("1", "2")
    assert "keys_version" not in differences(WHOLE.identity, now)


@pytest.mark.parametrize("keys", [None, {}, {"version": "1"}, {"version": True}, [1], 1, ...])
def test_keys_of_the_wrong_kind_are_refused_though_the_digest_holds(keys: Any) -> None:
    value = a_manifest(a_pipeline(record_keys=True)).to_dict()
    if keys is ...:
        del value["stream"]["keys"]
    else:
        value["stream"]["keys"] = keys
    with pytest.raises(ValueError, match="the manifest lacks or mistypes a part"):
        Manifest.from_bytes(seal(value))
    with pytest.raises(ValueError, match="its config and its keys disagree"):
        Manifest.from_bytes(seal({**plain(), "stream": {**STREAM, "keys": {"version": 1}}}))


def test_the_orders_version_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    monkeypatch.setitem(loader.ORDER_VERSIONS, "feistel", 2)
    assert differences(before, identity()) == {"order_version": ("1", "2")}


@pytest.mark.parametrize(
    ("before", "now", "texts"),
    [
        ({"a": 1}, {"a": 2}, {"run_config.a": ("1", "2")}),
        ({"a": 1}, {}, {"run_config.a": ("1", "absent")}),
        ({}, {"a": None}, {"run_config.a": ("absent", "None")}),
        ({"a": 1}, {"a": True}, {"run_config.a": ("1", "True")}),
        ({"a": 1}, {"a": 1.0}, {"run_config.a": ("1", "1.0")}),
        ({"a": 0.0}, {"a": -0.0}, {"run_config.a": ("0.0", "-0.0")}),
        ({"a": 1}, {"a": "1"}, {"run_config.a": ("1", "'1'")}),
        ({"a": None}, {"a": "None"}, {"run_config.a": ("None", "'None'")}),
        ({"a": "absent"}, {}, {"run_config.a": ("'absent'", "absent")}),
        ({"a": ""}, {"a": "b"}, {"run_config.a": ("''", "'b'")}),
        ({"a": [1, {"b": 1}]}, {"a": [1, {"b": 1.0}]}, {"run_config.a": ("[1, {'b': 1}]", "[1, {'b': 1.0}]")}),
        ({"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 2, "c": 4}, {"run_config.a": ("1", "2"), "run_config.c": ("3", "4")}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}}, {}),
    ],
)  # fmt: skip
def test_each_key_of_the_run_config_is_compared_with_its_type(
    before: dict[str, Any], now: dict[str, Any], texts: dict[str, tuple[str, str]]
) -> None:
    assert differences(identity(**before), identity(**now)) == texts


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        ({"w": STATE["w"]}, {"train_state/step": ("int[]", "absent")}),
        ({**STATE, "b": 1.5}, {"train_state/b": ("absent", "float[]")}),
        (
            {"w": np.zeros((3, 2), np.float16), "step": np.int64(3)},
            {
                "train_state/w": ("float32[2,3]", "float16[3,2]"),
                "train_state/step": ("int[]", "int64[]"),
            },
        ),
        (
            {"v": STATE["w"], "step": 3},
            {"train_state/w": ("float32[2,3]", "absent"), "train_state/v": ("absent", "float32[2,3]")},
        ),
        (np.zeros(2), {"train_state/w": ("float32[2,3]", "absent"), "train_state/step": ("int[]", "absent"), "train_state": ("absent", "float64[2]")}),
    ],
)  # fmt: skip
def test_each_leaf_of_the_train_state_is_compared(
    state: Any, texts: dict[str, tuple[str, str]]
) -> None:
    assert differences(identity(), identity(state=state)) == texts


# Names of transforms.


def test_a_transform_that_is_changed_added_or_taken_away_is_a_difference() -> None:
    def of(transform: Callable[..., Any] | None) -> Identity:
        return identity(Pipeline(PIPELINE.source, PIPELINE.config, transform))

    assert differences(of(double), of(triple)) == {"transform.name": ("double", "triple")}
    assert differences(of(Scale(1)), of(Scale(2))) == {"transform.version": ("1", "2")}
    assert differences(of(Scale()), of(Scale(2))) == {"transform.version": ("''", "'2'")}
    assert differences(of(None), of(double)) == {
        "transform.name": ("absent", "double"),
        "transform.version": ("absent", "''"),
    }
    assert differences(of(double), of(None)).keys() == {"transform.name", "transform.version"}


# The next IDs.


@pytest.mark.parametrize("final_batch", ["partial", "drop", "pad"])
@pytest.mark.parametrize("shuffle", loader.order.SHUFFLES)
def test_next_ids_are_those_of_the_records_delivered_next(final_batch: str, shuffle: str) -> None:
    pipeline = a_pipeline(final_batch=final_batch, shuffle=shuffle, num_epochs=5)
    delivered = [batch["id"][batch["mask"]].tolist() for batch in pipeline]
    for step in range(len(pipeline)):
        expected = [entry for ids in delivered[step:] for entry in ids]
        assert next_ids(pipeline, pipeline.position(step)) == tuple(expected[:NEXT_IDS])
    assert next_ids(pipeline, pipeline.grid.position(len(pipeline))) == ()


def test_next_ids_look_at_no_more_records_than_they_name() -> None:
    seen: list[int] = []

    class Counting(Endless):
        def ids(self, rows: npt.NDArray[np.int64], /) -> npt.NDArray[Any]:
            seen.append(len(rows))
            return super().ids(rows)

    config = PipelineConfig(2**31 - 1, seed=0, final_batch="partial")
    assert len(next_ids(Pipeline(Counting(10**12), config), Position())) == NEXT_IDS
    assert sum(seen) == NEXT_IDS


@pytest.mark.parametrize("num_records", [1797, 10**12])
@pytest.mark.parametrize("name", ["{}", "train/shard-00017-of-01024/{:012}", "é" * 200 + "{}", "x" * 20_000 + "{}"])  # fmt: skip
def test_a_manifest_is_at_most_64_kib_at_any_number_of_records(num_records: int, name: str) -> None:
    config = PipelineConfig(256, seed=0, final_batch="pad", num_epochs=None)
    pipeline = Pipeline(Endless(num_records, name), config)
    manifest = a_manifest(pipeline, 2)
    assert len(manifest.to_bytes()) + 4096 <= 64 << 10
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    if len(name) < 1000:
        assert manifest.next_ids
        assert manifest.next_ids == tuple(pipeline.ids(2).tolist()[: len(manifest.next_ids)])


def test_names_and_values_that_look_alike_are_told_apart() -> None:
    def of(name: str, text: str) -> Identity:
        source = loader.ArraySource({name: np.arange(9)}, ids=[f"{text}{i}" for i in range(9)])
        config = PipelineConfig(3, seed=1, final_batch="pad", exclude=(f"{text}0",))
        run_config = {"same": {name: 1}, "list": [text]}
        pipeline = Pipeline(source, config, functools.partial(double, mode=text))
        return Identity.of(pipeline, run_config, describe({name: np.zeros(1)}))

    composed, split = "caf\xe9", "cafe\u0301"
    found = of(composed, composed).diff(of(split, split))
    shown = {one.name: (one.checkpoint, one.now) for one in found}
    assert len(shown) == len(found) == 10
    assert all(text.isascii() for name, texts in shown.items() for text in (name, *texts))
    assert all(before != now for before, now in shown.values())
    for prefix in ("dataset.", "run_config.same.", "train_state/"):
        assert shown[rf"{prefix}caf\xe9"][1] == shown[rf"{prefix}cafe\u0301"][0] == "absent"
    assert shown["run_config.list"] == (r"['caf\xe9']", r"['cafe\u0301']")
    assert shown["exclude"] == (r"['caf\xe90']", r"['cafe\u03010']")
    assert shown["transform.name"] == (r"double(mode='caf\xe9')", r"double(mode='cafe\u0301')")
    only = of(composed, composed).diff(of(composed, split))
    names = {one.name for one in only}
    assert names == {"dataset.id", "exclude", "run_config.list", "transform.name"}
