"""Which GPUs servers get beside the trainer."""

import pytest

from sao.engines.placement import gpus_per_server, share_gpus, visible_gpus

SHARE = ("--gpu-memory-utilization=0.3",)


@pytest.mark.parametrize(
    ("gpus", "servers", "trainer", "extra_args", "expected"),
    [
        ("0123", 2, 1, (), ["1", "2"]),
        ("0123", 1, 2, ("--tensor-parallel-size=2",), ["23"]),
        ("01234567", 2, 4, ("-tp", "2", "--max-logprobs=5"), ["45", "67"]),
        ("46", 2, 0, (), ["4", "6"]),
        ("0", 1, 1, SHARE, ["0"]),
        ("0", 1, 0, (), ["0"]),
        ("0123", 4, 4, SHARE, ["0", "1", "2", "3"]),
        ("0123", 3, 2, SHARE, ["1", "2", "3"]),
        ("", 3, 0, (), ["", "", ""]),
    ],
)
def test_servers_take_the_gpus_behind_the_trainers(
    gpus: str, servers: int, trainer: int, extra_args: tuple[str, ...], expected: list[str]
):
    """Catches a server on the trainer's GPU while another is idle, replicas that all span the same GPUs, and one on a
    GPU that does not exist."""
    found = share_gpus(gpus, servers=servers, trainer=trainer, extra_args=extra_args)
    assert ["".join(each) for each in found] == expected


def test_what_cannot_be_placed_is_refused():
    """Catches a second replica on a machine of one GPU, and a server whose default share leaves the trainer nothing."""
    with pytest.raises(ValueError, match=r"2 vLLM servers of 1 GPUs each need 2, and this machine shows 1 \(0\)"):
        share_gpus("0", servers=2, trainer=1, extra_args=SHARE)
    with pytest.raises(ValueError, match=r"lower engine\.replicas to 1"):
        share_gpus("0123", servers=2, trainer=0, extra_args=("--tensor-parallel-size=4",))
    with pytest.raises(ValueError, match=r"share GPU 0, .*--gpu-memory-utilization=0\.3"):
        share_gpus("0", servers=1, trainer=1, extra_args=())


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ((), 1),
        (("--tensor-parallel-size=4",), 4),
        (("--tensor-parallel-size", "2", "-pp=2"), 4),
        (("-dp", "2", "--decode-context-parallel-size=2"), 2),
    ],
)
def test_the_span_follows_from_the_arguments(extra_args: tuple[str, ...], expected: int):
    """Catches a spelling of vLLM's flags that is overlooked, so that two servers overlap."""
    assert gpus_per_server(extra_args) == expected


def test_gpus_are_named_as_the_environment_names_them(monkeypatch: pytest.MonkeyPatch):
    """Catches a share of a machine in which servers take GPUs of someone else."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f")
    assert visible_gpus(2) == ("4", "GPU-8f")
    assert visible_gpus(0) == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(2) == ("0", "1")
