"""The threads of a step go on without one that has lost its CPU, and no result is stored twice or never."""

import subprocess
from pathlib import Path

import pytest

from engine_worker.kernels.build import SOURCE_DIR

DRIVER = Path(__file__).with_name("team_driver.cpp")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("team") / "driver"
    command = ["g++", "-std=c++17", "-O2", "-fopenmp", "-pthread", f"-I{SOURCE_DIR}", str(DRIVER), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def run(driver: Path, *arguments: object) -> None:
    done = subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, ""), done


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_thread_that_stops_with_an_item_in_hand_does_not_stop_the_team(driver: Path, threads: int) -> None:
    run(driver, "goes_on", threads)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_taken_item_is_resumed_behind_the_runs_that_are_stored(driver: Path, threads: int) -> None:
    run(driver, "resumes", threads)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_no_item_is_taken_while_its_results_are_stored(driver: Path, threads: int) -> None:
    run(driver, "waits", threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_sums_are_those_of_one_thread_wherever_threads_stop(driver: Path, threads: int) -> None:
    run(driver, "adds", threads, threads, 60)
