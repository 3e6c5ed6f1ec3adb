"""What `thimble top` makes of two scrapes, worked out by hand; the whole way is in tests/e2e."""

from services.tools.top_view import Scrape, Window, view


def scrape(scale: float, at_s: float, gpu: bool = True) -> Scrape:
    """A GPU's engine that has done so many times 100 steps."""
    lines = {
        'thimble_model_info{model_name="m",device="NVIDIA X"}': 1,
        "thimble_decode_steps_total": 100,
        "thimble_generation_tokens_total": 200,
        'thimble_token_time_seconds_total{part="dense"}': 1.5,
        'thimble_token_time_seconds_total{part="experts"}': 0.4,
        'thimble_token_time_seconds_total{part="rest"}': 0.1,
        "thimble_prompt_tokens_total": 50,
        "thimble_prefix_cache_hits_total": 30,
        "thimble_prefix_cache_queries_total": 80,
        'thimble_expert_lookups_total{tier="ram",phase="decode"}': 90,
        'thimble_expert_lookups_total{tier="nvme",phase="decode"}': 10,
        'thimble_experts_computed_total{device="cpu",phase="decode"}': 60,
        'thimble_experts_computed_total{device="gpu",phase="decode"}': 40,
        'thimble_nvme_read_bytes_total{kind="demand"}': 4e9,
        'thimble_disk_wait_seconds_total{phase="decode"}': 0.5,
        'thimble_forward_seconds_total{phase="decode"}': 2.0,
        'thimble_pcie_bytes_total{dir="to_gpu"}': 8e9 if gpu else 0,
        "thimble_late_tokens_total": 2,
    }
    levels = {
        "thimble_num_requests_running": 2,
        "thimble_num_requests_waiting": 3,
        "thimble_gpu_temperature_celsius": 61,
        "thimble_gpu_power_watts": 140,
        "thimble_gpu_busy_ratio": 0.75,
        'thimble_memory_planned_bytes{kind="vram",owner="dense weights"}': 6e9,
        'thimble_memory_used_bytes{kind="vram"}': 7e9,
        "thimble_hot_states": 5,
        "thimble_api_snapshot_store_available": 1,
        'thimble_api_snapshot_store_bytes{kind="used"}': 1e9,
        'thimble_api_snapshot_store_bytes{kind="limit"}': 4e9,
    }
    samples = {name: value * scale for name, value in lines.items()} | levels
    return Scrape.parse("".join(f"{name} {value}\n" for name, value in samples.items()), at_s=at_s)


def test_what_rose_between_two_scrapes() -> None:
    text = view(scrape(1, 10.0), scrape(3, 14.0))
    assert text == [
        "m on NVIDIA X, the last 4.0 s",
        "",
        "answers     100.00 tok/s, 20.00 ms a step; 2 running, 3 waiting",
        "prompts     25.00 tok/s read; 60 of 160 prompt tokens (38%) from snapshots",
        "",
        f"dense       {'#' * 30:<40}    15.000 ms  75.0%",
        f"experts     {'#' * 8:<40}     4.000 ms  20.0%",
        f"rest        {'#' * 2:<40}     1.000 ms   5.0%",
        "",
        "experts     decode: 90.0% ram, 10.0% nvme; computed by 60% cpu, 40% gpu",
        "disk        2.00 GB/s demand; waited for 25.0% of the model's time",
        "PCIe        4.00 GB/s to gpu; 4 tokens were late",
        "GPU         75% busy, 140 W, 61 C",
        "VRAM        7.000 GB used; planned: dense weights 6.000",
        "snapshots   1.000 of 4.000 GB in the store; 5 states in the engine's memory",
    ]


def test_nothing_in_between_shows_what_was_since_the_start() -> None:
    text = view(scrape(2, 10.0, gpu=False), scrape(2, 14.0, gpu=False))
    assert text[0] == "m on NVIDIA X, since the start; no token in the last 4.0 s"
    assert text[2].startswith("answers     400.00 tok, 20.00 ms a step")
    assert not any(line.startswith("PCIe") for line in text)


def test_an_engine_that_began_again_counts_from_nothing() -> None:
    assert Window(scrape(3, 0.0), scrape(1, 2.0)).sum("thimble_decode_steps_total") == 100


def test_no_service_has_said_anything() -> None:
    assert view(Scrape({}), Scrape({}))[-1] == "api         does not answer"
