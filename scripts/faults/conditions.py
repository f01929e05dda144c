"""All conditions but kills and damages, each as a function that provokes it and says what was seen."""

import pathlib
from collections.abc import Callable
from typing import Final

from scripts.faults import endings, places
from scripts.faults.children import Outcome

CONDITIONS: Final[tuple[Callable[[pathlib.Path], Outcome], ...]] = (
    places.disk_full,
    places.file_size_limit,
    places.read_only,
    places.missing,
    places.a_file,
    places.relative_path,
    places.strange_path,
    places.two_writers,
    places.lock_of_a_killed_process,
    places.damaged_step_in_the_way,
    endings.clock_jumps_back,
    endings.exception_in_the_loop,
    endings.exception_in_the_background,
    endings.end_of_the_script,
    endings.sys_exit,
    endings.uncaught_exception,
    endings.exit_with_a_failing_save,
    endings.exit_after_a_failed_save,
    places.moved_away,
    endings.save_twice,
    endings.finished_run,
    endings.sigterm,
    endings.sigint,
)
