"""The settings: each bad one is named, and a config is the same after any way through a file."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader import PipelineConfig, config

GOOD: Final[dict[str, Any]] = {"batch_size": 4, "seed": 17, "final_batch": "pad"}

configs = st.builds(
    PipelineConfig,
    batch_size=st.integers(1, config.MAX_BATCH_SIZE),
    seed=st.integers(0, 2**32 - 1),
    final_batch=st.sampled_from(config.FINAL_BATCHES),
    num_epochs=st.none() | st.integers(1, 2**63 - 1),
    shuffle=st.sampled_from(["feistel", "permutation", "none"]),
    on_bad_record=st.sampled_from(config.BAD_RECORDS),
    record_keys=st.booleans(),
)

NO_INTEGERS: Final[list[Any]] = [
    *(4.0, "4", True, np.True_, np.float64(4), [4], {}, b"4", 4j, np.array([4])),
]
NO_STRINGS: Final[list[Any]] = [1, b"pad", ["pad"], {"pad"}, True]

#: By setting, values that it cannot have, with the error that each is.
BAD_VALUES: Final[list[tuple[str, Any, type[Exception]]]] = [
    *[("batch_size", value, ValueError) for value in (0, -1, 2**31, 10**4000, np.int64(0))],
    *[("seed", value, ValueError) for value in (-1, 2**32, -(10**20))],
    *[("num_epochs", value, ValueError) for value in (0, -3, 2**63)],
    *[
        (name, value, TypeError)
        for name in ("batch_size", "seed", "num_epochs")
        for value in NO_INTEGERS
    ],
    *[(name, None, TypeError) for name in ("batch_size", "seed", "final_batch", "shuffle")],
    *[
        (name, value, ValueError)
        for name in ("final_batch", "shuffle", "on_bad_record")
        for value in ("", "Pad", "pad ", "true", "x" * 100_000)
    ],
    *[
        (name, value, TypeError)
        for name in ("final_batch", "shuffle", "on_bad_record")
        for value in NO_STRINGS
    ],
    *[("record_keys", value, TypeError) for value in (0, 1, None, "true", "", [True])],
]


def make(**settings: Any) -> PipelineConfig:
    return PipelineConfig(**settings)


def from_toml(tmp_path: pathlib.Path, text: str | bytes) -> PipelineConfig:
    path = tmp_path / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return PipelineConfig.from_toml(path)


def as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, whose strings and integers are JSON's, and which has no null."""
    values = {name: "none" if value is None else value for name, value in settings.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


# What a config is


def test_defaults_are_one_shuffled_epoch_that_raises_at_a_bad_record() -> None:
    made = make(**GOOD)
    assert (made.num_epochs, made.shuffle, made.on_bad_record) == (1, "feistel", "raise")
    assert made.record_keys is False


def test_final_batch_has_no_default() -> None:
    with pytest.raises(TypeError, match="final_batch"):
        make(batch_size=4, seed=17)


@pytest.mark.parametrize("field", dataclasses.fields(PipelineConfig), ids=lambda field: field.name)
def test_config_is_frozen(field: dataclasses.Field[Any]) -> None:
    made = make(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, field.name, getattr(made, field.name))


def test_equal_settings_are_equal_configs_with_equal_hashes() -> None:
    assert make(**GOOD) == make(**GOOD)
    assert hash(make(**GOOD)) == hash(make(**GOOD))
    assert make(**GOOD) != make(**{**GOOD, "seed": 18})


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_numpy_integers_truth_values_and_strings_become_pythons(
    kind: type[np.integer[Any]],
) -> None:
    made = make(
        batch_size=kind(4),
        seed=kind(17),
        final_batch=np.str_("pad"),
        num_epochs=kind(1),
        record_keys=np.False_,
    )
    assert made == make(**GOOD)
    assert make(**GOOD, record_keys=np.True_).record_keys is True
    assert json.loads(json.dumps(made.to_dict())) == make(**GOOD).to_dict()
    for name, value in made.to_dict().items():
        assert type(value) in {int, str, list, bool}, name


# Round trips


@given(configs)
def test_config_survives_a_dict_and_json(made: PipelineConfig) -> None:
    plain = made.to_dict()
    assert PipelineConfig.from_dict(json.loads(json.dumps(plain))) == made
    assert list(plain) == [field.name for field in dataclasses.fields(PipelineConfig)]


@given(configs, st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_config_survives_a_toml_file(
    tmp_path: pathlib.Path, made: PipelineConfig, in_table: bool
) -> None:
    text = "[pipeline]\n" * in_table + as_toml(made.to_dict())
    assert from_toml(tmp_path, text) == made


def test_to_dict_gives_a_copy() -> None:
    made = make(**GOOD)
    made.to_dict()["seed"] = 18
    assert made.seed == 17


# Bad settings


def direct(settings: dict[str, Any]) -> PipelineConfig:
    return make(**settings)


@pytest.mark.parametrize("make_it", [direct, PipelineConfig.from_dict])
@pytest.mark.parametrize(
    ("name", "value", "kind"),
    BAD_VALUES,
    ids=[f"{i}-{case[0]}-{type(case[1]).__name__}" for i, case in enumerate(BAD_VALUES)],
)
def test_each_bad_value_is_an_error_that_names_its_setting(
    name: str, value: Any, kind: type[Exception], make_it: Callable[[Any], PipelineConfig]
) -> None:
    with pytest.raises(kind, match=f"'{name}' must be ") as caught:
        make_it({**GOOD, name: value})
    text = str(caught.value)
    assert len(text) < 300
    assert not any(f"'{other}' must" in text for other in {*GOOD, "num_epochs"} - {name})


def test_message_shows_the_value_and_what_would_be_right() -> None:
    with pytest.raises(
        ValueError, match=r"'batch_size' must be an integer, 1 to 2147483647, not 0"
    ):
        make(**{**GOOD, "batch_size": 0})


@pytest.mark.parametrize("sign", [1, -1])
def test_integer_too_long_to_print_is_named_all_the_same(sign: int) -> None:
    value = sign * 10**5000
    with pytest.raises(ValueError, match=r"'seed' must be .*, not an integer of 16610 bits"):
        make(**{**GOOD, "seed": value})


def test_all_problems_of_a_mapping_come_in_one_error() -> None:
    with pytest.raises(ValueError, match="PipelineConfig: ") as caught:
        PipelineConfig.from_dict(
            {"batch_size": "4", "shuffle": "random", "num_epoch": 3, "sede": 1, "num_epochs": 0}
        )
    text = str(caught.value)
    for named in (
        "'batch_size' must be",
        "'shuffle' must be",
        "'num_epochs' must be",
        "'num_epoch' is not a setting",
        "'sede' is not a setting",
        "'seed' is missing",
        "'final_batch' is missing",
    ):
        assert named in text, text
    assert text.count(";") == 6


def test_all_bad_arguments_come_in_one_error() -> None:
    with pytest.raises(TypeError) as caught:
        make(batch_size=1.5, seed=None, final_batch=0)
    assert str(caught.value).count(" must be ") == 3


@pytest.mark.parametrize("missing", GOOD)
def test_each_missing_setting_is_named(missing: str) -> None:
    given_ = {name: value for name, value in GOOD.items() if name != missing}
    with pytest.raises(ValueError, match=f"'{missing}' is missing") as caught:
        PipelineConfig.from_dict(given_)
    assert str(caught.value).count("is missing") == 1


@pytest.mark.parametrize("key", ["Seed", "batchsize", "", "threads", 5, None, ("a",)])
def test_unknown_keys_are_named(key: Any) -> None:
    with pytest.raises(ValueError, match="is not a setting") as caught:
        PipelineConfig.from_dict({**GOOD, key: 1})
    assert f"{key!r} is not a setting" in str(caught.value)


@pytest.mark.parametrize("value", [None, 3, "seed", [("seed", 1)], ["seed"]])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="must be a mapping"):
        PipelineConfig.from_dict(value)


# TOML files


def test_pipeline_table_may_stand_beside_tables_of_others(tmp_path: pathlib.Path) -> None:
    text = f"[run]\nlr = 0.1\n[pipeline]\n{as_toml(GOOD)}[run.more]\nseed = 3\n"
    assert from_toml(tmp_path, text) == make(**GOOD)


def test_settings_may_stand_at_the_top_where_there_is_no_table(tmp_path: pathlib.Path) -> None:
    assert from_toml(tmp_path, as_toml(GOOD)) == make(**GOOD)
    assert from_toml(tmp_path, as_toml(GOOD).replace("\n", "\r\n")) == make(**GOOD)


def test_path_may_be_text(tmp_path: pathlib.Path) -> None:
    from_toml(tmp_path, as_toml(GOOD))
    assert PipelineConfig.from_toml(str(tmp_path / "settings.toml")) == make(**GOOD)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            f"{as_toml(GOOD)}[run]\nlr = 0.1\n",
            r"'run' is not a setting. .* in the table \[pipeline\]",
        ),
        (f"seed = 3\n[pipeline]\n{as_toml(GOOD)}", "'seed' must be inside a table"),
        ("pipeline = 3\n", "'pipeline' must be inside a table"),
        (f"[[pipeline]]\n{as_toml(GOOD)}", "'pipeline' must be inside a table"),
        ("", "'batch_size' is missing"),
        ("[pipeline]\n", "'final_batch' is missing"),
        (f"[pipeline]\n{as_toml(GOOD)}threads = 3\n", "'threads' is not a setting"),
        (f"[pipeline]\n{as_toml(GOOD)}[pipeline.num_epochs]\n", "'num_epochs' must be"),
        (as_toml({**GOOD, "num_epochs": "forever"}), "'num_epochs' must be"),
        (as_toml({**GOOD, "seed": 1.0}), "'seed' must be .* not 1.0"),
        (as_toml(GOOD).replace("17", "nan"), "'seed' must be .* not nan"),
        (as_toml(GOOD).replace("17", "1979-05-27"), "'seed' must be .* not datetime"),
        (as_toml(GOOD).replace("17", "true"), "'seed' must be .* not True"),
        (as_toml(GOOD) + as_toml(GOOD), "is not a TOML file"),
        (as_toml(GOOD).replace("17", "0x" + "f" * 16_000), "'seed' must be .* 64000 bits"),
        ("batch_size", "is not a TOML file"),
    ],
)
def test_each_fault_of_a_file_is_an_error_that_names_it(
    tmp_path: pathlib.Path, text: str, named: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=named) as caught:
        from_toml(tmp_path, text)
    assert "settings.toml" in str(caught.value)


LIMIT: Final = config.MAX_TOML_BYTES
HOSTILE: Final = {
    "nested arrays": b"a=" + b"[" * (LIMIT - 2),
    "nested tables": b"a=" + b"{a=" * (LIMIT // 3 - 2),
    "closed nested arrays": b"a=" + b"[" * (LIMIT // 2 - 2) + b"]" * (LIMIT // 2 - 2),
    "a dotted key": b".".join([b"a"] * (LIMIT // 2 - 2)) + b"=1",
    "a dotted table": b"[" + b".".join([b"a"] * (LIMIT // 2 - 2)) + b"]",
    "a long integer": b"seed=" + b"9" * (LIMIT - 10),
    "a long hexadecimal integer": b"seed=0x" + b"f" * (LIMIT - 10),
    "many keys": b"\n".join(b"k%d=1" % i for i in range(LIMIT // 8)),
    "a long string": b'seed="' + b"a" * (LIMIT - 10) + b'"',
    "zero bytes": bytes(LIMIT),
    "not UTF-8": b'final_batch = "\xff"',
    "a byte order mark": "\ufeff".encode() + as_toml(GOOD).encode(),
    "a lone surrogate": b'seed = "\xed\xa0\x80"',
    "an image": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "a gigabyte's beginning": b"#" * (LIMIT + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_a_value_error(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"settings\.toml"):
        from_toml(tmp_path, HOSTILE[name])


def test_file_is_read_up_to_the_limit_and_no_further(tmp_path: pathlib.Path) -> None:
    text = as_toml(GOOD)
    filler = "#" * (LIMIT - len(text))
    assert from_toml(tmp_path, text + filler) == make(**GOOD)
    with pytest.raises(ValueError, match=f"larger than {LIMIT} bytes"):
        from_toml(tmp_path, text + filler + "#")
    with pytest.raises(ValueError, match=f"larger than {LIMIT} bytes"):
        PipelineConfig.from_toml("/dev/zero")


def test_file_that_cannot_be_read_is_an_os_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        PipelineConfig.from_toml(tmp_path / "absent.toml")
    with pytest.raises(IsADirectoryError):
        PipelineConfig.from_toml(tmp_path)
