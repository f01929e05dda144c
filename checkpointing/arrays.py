"""The arrays of a step, as Orbax writes and reads them: its handler without its checkpointer.

Orbax's checkpointer waits for all processes in device collectives, without a limit, and delays an exit by
300 s if it cannot make its directories.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath  # type: ignore[import-untyped]  # the paths of Orbax, which brings it

from checkpointing.storage.base import ITERATOR_ITEM, MANIFEST_ITEM, TRAIN_STATE_ITEM
from checkpointing.train_state import pointer

_Result = TypeVar("_Result")

#: Gigabytes that may be compressed and written at the same time, as in Orbax's standard handler.
_MAX_WRITING_GB: Final = 96
#: The least size of a file of arrays (the last one may be smaller), and the largest, Orbax's default.
_FILE_BYTES: Final = 32 << 20
_MAX_FILE_BYTES: Final = 2 << 30


class ArrayWriter:
    """Writes trees of arrays, one at a time.

    Args:
      process: the number of this JAX process.
      timeout_s: seconds after which a write has failed; ``None`` for no limit.
    """

    def __init__(self, process: int, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        # The standard handler contains this one, and checks each leaf once more, which takes time.
        self._handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=_MAX_WRITING_GB)
        # With all processes active, they would wait for each other at each save.
        alone = ocp.options.MultiprocessingOptions(
            active_processes={process}, barrier_sync_key_prefix=f"regrain_{process}"
        )
        self._checkpointer = ocp.Checkpointer(self._handler, multiprocessing_options=alone)

    def begin(self, step_path: str | os.PathLike[str], tree: Any) -> Sequence[ocp.Future]:
        """Copy the arrays and begin to write them; they may be donated or deleted from then on.

        Args:
          step_path: directory of the step, which exists.
          tree: the arrays, as `train_state.to_stored` gives them.
        """
        # Without a number of its own, a save waits for the directories of any other Orbax save in this program.
        self._checkpointer.synchronize_next_awaitable_signal_operation_id()
        args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_file_bytes(tree))
        loop = asyncio.new_event_loop()
        try:
            begun: Sequence[ocp.Future] = loop.run_until_complete(
                self._handler.async_save(epath.Path(step_path) / TRAIN_STATE_ITEM, args=args)
            )
        finally:
            loop.close()
        return begun

    def finish(self, begun: Sequence[ocp.Future]) -> None:
        """Wait until all is written; raise the first error once every part has ended.

        Raises:
          TimeoutError: it took longer than ``timeout_s``.
        """
        try:
            errors = _within(self._timeout_s, "write", lambda: [_error_of(part) for part in begun])
        except TimeoutError:
            for part in (
                begun
            ):  # else its threads delay the interpreter's exit; old ones cannot be cancelled
                getattr(part, "cancel", lambda: None)()
            raise
        for error in errors:
            if error is not None:
                raise error

    def merge(self, step_path: str | os.PathLike[str]) -> None:
        """Merge what all processes have written into one tree. For one process, after all have finished."""
        path = epath.Path(step_path) / TRAIN_STATE_ITEM
        _within(self._timeout_s, "merge", lambda: self._handler.finalize(path))

    def close(self) -> None:
        """Free what Orbax holds."""
        self._checkpointer.close()


def read_arrays(
    step_path: str | os.PathLike[str], templates: Mapping[str, Any], timeout_s: float | None
) -> dict[str, Any]:
    """Read all arrays of a step.

    Args:
      step_path: directory of the step.
      templates: what is wanted at a path of the stored tree. An array whose template has a sharding is
        read as JAX's array, any other as NumPy's.
      timeout_s: seconds after which the read has failed; ``None`` for no limit.

    Returns:
      The arrays by their path in the stored tree, a JSON pointer.
    """
    path = epath.Path(step_path) / TRAIN_STATE_ITEM

    def how(keys: tuple[Any, ...], _: Any) -> ocp.RestoreArgs:
        sharding = getattr(templates.get(pointer(keys)), "sharding", None)
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding)

    def read() -> Any:
        handler = ocp.PyTreeCheckpointHandler()
        try:
            wanted = jax.tree_util.tree_map_with_path(how, handler.metadata(path).tree)
            return handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))
        finally:
            handler.close()

    tree = _within(timeout_s, "read", read)
    return {pointer(keys): array for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]}


def description(began_ns: int) -> dict[str, Any]:
    """Return what Orbax keeps of a step that is committed now: its manager reads the kinds of items in it.

    Args:
      began_ns: time of the beginning of the save, in nanoseconds since 1970.
    """
    json_item = ocp.JsonCheckpointHandler.typestr()
    return {
        "item_handlers": {
            TRAIN_STATE_ITEM: ocp.StandardCheckpointHandler.typestr(),
            ITERATOR_ITEM: json_item,
            MANIFEST_ITEM: json_item,
        },
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": began_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }


def _file_bytes(tree: Any) -> int:
    """Size of the files of arrays: small, so that all cores have files to digest.

    Orbax cuts a larger array into parts whose sides divide its sides: a vector of prime length into single
    values. So a file is never smaller than the largest array.
    """
    largest: int = max(leaf.nbytes for leaf in jax.tree.leaves(tree))
    return min(max(_FILE_BYTES, largest), _MAX_FILE_BYTES)


def _error_of(part: ocp.Future) -> Exception | None:
    """Wait for the end of a part, and return its error."""
    try:
        part.result()
    except Exception as error:  # noqa: BLE001 (whatever it is, the save has failed)
        return error
    return None


def _within(timeout_s: float | None, what: str, work: Callable[[], _Result]) -> _Result:
    """Do work for which Orbax has no time limit, such as waiting for a store that does not answer.

    Raises:
      TimeoutError: it has not ended in time. It goes on in a thread that does not delay the exit.
    """
    if timeout_s is None:
        return work()
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            with jax.transfer_guard("allow"):  # as in the thread that waits
                done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised below)
            done.set_exception(error)

    threading.Thread(target=run, name="regrain-store", daemon=True).start()
    try:
        return done.result(timeout_s)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(
            f"to {what} the train state took more than {timeout_s:g} s: the store does not answer, or is "
            "slower than process_timeout_s allows for"
        ) from None
