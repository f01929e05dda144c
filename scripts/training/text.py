"""A byte-level language model of Python's own source text: one block of attention, and Adam, in plain JAX.

The text is that of some modules of the standard library, which every machine has. It is another one in
another version of Python: then the fingerprint is another one too, and a run of before is not resumed.
"""

import dataclasses
import hashlib
import pathlib
import sysconfig
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import loader
from scripts.training.prepared import FOLDER, prepared
from scripts.training.task import Batch, State, Task, settings_of

#: Some 600 kB; each is a file of its own in all versions from 3.11 on.
MODULES: Final = (
    "argparse",
    "ast",
    "calendar",
    "contextlib",
    "csv",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "pprint",
    "random",
    "statistics",
    "textwrap",
    "traceback",
)
END: Final = 256  # the token that ends a document; bytes are 0 to 255
VOCABULARY: Final = 257
NUM_FILES: Final = 2

_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Data:
    """The table ``[data]``.

    Attributes:
      kind: ``"text"``.
      window: how many bytes the model sees.
    """

    kind: str
    window: int


@dataclasses.dataclass(frozen=True)
class Train:
    """The table ``[train]``.

    Attributes:
      seed: of the first parameters and of the dropout.
      width: of the vector that stands for a byte.
      heads: of the attention; they divide the width.
      learning_rate: of Adam.
      dropout: share of the vectors' entries that are left out in a step.
    """

    seed: int
    width: int
    heads: int
    learning_rate: float
    dropout: float


def task(data: Any, train: Any) -> Task:
    """The task, from the tables of a config file."""
    window, settings = settings_of("data", data, Data).window, settings_of("train", train, Train)
    source = text(window)

    def summary(state: State) -> str:
        batch = source.read(np.arange(min(len(source), 256)))
        mask = np.ones(len(batch["length"]), np.bool_)
        logits = forward(state["params"], batch["tokens"][:, :-1], settings.heads)
        bits = mean_loss(logits, {**batch, "mask": mask}) / np.log(2)
        return f"{bits:.2f} bits a byte on text that it was trained on"

    return Task(source, None, lambda: init(settings, window), make_train_step(settings), summary)


def text(window: int = 64, folder: pathlib.Path = FOLDER) -> loader.TokenSource:
    """Windows of the modules' text; each module is a document."""
    documents = module_texts(pathlib.Path(sysconfig.get_paths()["stdlib"]))
    digest = hashlib.sha256(b"\xff".join(documents)).hexdigest()[:16]

    def write(path: pathlib.Path) -> None:
        for number in range(NUM_FILES):
            ended = [[*one, END] for one in documents[number::NUM_FILES]]
            np.concatenate(ended).astype("<u2").tofile(path / f"text-{number}.bin")

    return loader.TokenSource(
        prepared(f"text-{digest}", write, folder),
        window,
        documents=END,
        rest="pad",
        vocabulary=VOCABULARY,
    )


def module_texts(stdlib: pathlib.Path) -> list[bytes]:
    """The source of each of `MODULES` that there is, in their order.

    Raises:
      ValueError: there is none.
    """
    paths = [stdlib / f"{module}.py" for module in MODULES]
    texts = [path.read_bytes() for path in paths if path.is_file()]
    if not texts:
        raise ValueError(f"{stdlib} holds no source text of Python's standard library")
    return texts


def init(train: Train, window: int) -> State:
    """The train state that a run begins with."""
    if train.width % train.heads:
        raise ValueError(f"[train]: heads {train.heads} do not divide the width {train.width}")
    width = train.width
    shapes = {
        "bytes": (VOCABULARY, width),
        "places": (window, width),
        "attention_in": (width, 3 * width),
        "attention_out": (width, width),
        "mlp_in": (width, 4 * width),
        "mlp_out": (4 * width, width),
        "logits": (width, VOCABULARY),
    }
    key, *keys = jax.random.split(jax.random.key(train.seed), len(shapes) + 1)
    params = {
        name: jax.random.normal(one, shape) * shape[0] ** -0.5
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    step = jnp.zeros((), jnp.int32)
    return {"params": params, "mean": zeros, "square": zeros, "key": key, "step": step}


def forward(
    params: Params, tokens: Any, heads: int, key: Any = None, dropout: float = 0
) -> jax.Array:
    """Logits of the next byte, float32[batch, window, 257], at each of tokens, int32[batch, window]."""
    count, window = tokens.shape
    # A product in place of a look-up: the gradient of a look-up adds in any order on some devices.
    x = jax.nn.one_hot(tokens, VOCABULARY) @ params["bytes"] + params["places"][None]
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0.0)
    mixed = (normal(x) @ params["attention_in"]).reshape(count, window, 3, heads, -1)
    queries, keys, values = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) * queries.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((1, 1, window, window), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(count, window, -1)
    x = x + attended @ params["attention_out"]
    x = x + jax.nn.gelu(normal(x) @ params["mlp_in"]) @ params["mlp_out"]
    return normal(x) @ params["logits"]


def normal(x: jax.Array) -> jax.Array:
    """Vectors of unit mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def mean_loss(logits: jax.Array, batch: Batch) -> Any:
    """Mean over the targets that are there, in nats: not those that pad a document or a batch."""
    targets = jax.nn.one_hot(batch["tokens"][:, 1:], VOCABULARY)
    losses = -jnp.sum(jax.nn.log_softmax(logits) * targets, axis=-1)
    there = jnp.arange(1, losses.shape[1] + 1)[None] < batch["length"][:, None]
    return loader.masked_mean(losses, there & batch["mask"][:, None])


def make_train_step(train: Train) -> Any:
    """The compiled function (state, batch) -> (next state, loss)."""

    def loss_of(params: Params, key: jax.Array, batch: Batch) -> Any:
        tokens = batch["tokens"][:, :-1]
        return mean_loss(forward(params, tokens, train.heads, key, train.dropout), batch)

    @jax.jit
    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        key, dropout_key = jax.random.split(state["key"])
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], dropout_key, batch)
        step = state["step"] + 1
        mean = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, state["mean"], gradients)
        square = jax.tree.map(
            lambda s, g: _BETA2 * s + (1 - _BETA2) * g**2, state["square"], gradients
        )
        count = step.astype(jnp.float32)
        rate = train.learning_rate * jnp.sqrt(1 - _BETA2**count) / (1 - _BETA1**count)
        params = jax.tree.map(
            lambda p, m, s: p - rate * m / (jnp.sqrt(s) + _EPSILON), state["params"], mean, square
        )
        return {"params": params, "mean": mean, "square": square, "key": key, "step": step}, loss

    return train_step
