"""What a run needs around its steps: time by phase, work beside it, and an end when it is asked for one."""

import signal

import pytest

from verl.trainer.ppo.run_control import Interrupt, StopNow, Stopwatch, in_background


def test_a_phase_that_comes_twice_is_counted_together():
    heard = []
    watch = Stopwatch(heard.append)
    with watch("step"):
        for _ in range(2):
            with watch("gen"):
                pass
    assert heard == ["step", "gen", "gen"] and watch.seconds["step"] >= watch.seconds["gen"] > 0


def test_what_fails_in_the_background_fails_for_whoever_asks():
    def stopped():
        raise KeyboardInterrupt

    assert in_background(lambda: 3).result(20) == 3
    with pytest.raises(KeyboardInterrupt):
        in_background(stopped).result(20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number, capsys):
    before = signal.getsignal(number)
    interrupt = Interrupt()
    with interrupt():
        interrupt.heed()
        signal.raise_signal(number)
        signal.raise_signal(number)  # a group's signal and a script's are one
        with pytest.raises(KeyboardInterrupt) as asked:
            interrupt.heed()
        assert not isinstance(asked.value, StopNow)
        interrupt._asked_at -= 2  # as if that had been two seconds ago
        with pytest.raises(StopNow, match="stopped at once"):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before
    assert capsys.readouterr().out.count("stopping: saving the last whole step") == 1
