"""Guards what every engine promises (the docstring of `Engine`), on each of Gym's own: embedded, in a process, vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_folder import VOCAB_SIZE
from stand_in_vllm import ServerThread, StandInVllm
from tiny_models import prompts, tiny_model, write_adapter

from gym_serve.engines.base import (
    Engine,
    EngineError,
    Finish,
    GenerationRequest,
    PromptTooLong,
    RequestRefused,
    SamplingParams,
    TokenStream,
    generate_all,
)

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), seed=seed) for seed in range(3)]


def make_transformers(folder: Path) -> Engine:
    from gym_serve.engines.transformers import TransformersEngine

    return TransformersEngine(tiny_model(), max_slots=8)


def make_remote(folder: Path) -> Engine:
    from gym_serve.engines.remote import RemoteEngine
    from gym_serve.engines.worker import WorkerSettings

    tiny_model().save_pretrained(folder)
    return RemoteEngine(WorkerSettings(folder=str(folder), dtype="float32", max_slots=8, num_threads=1))


def make_vllm(folder: Path) -> Engine:
    from gym_serve.engines.vllm import VllmEngine
    from gym_serve.engines.vllm_server import AttachedServer
    from gym_serve.settings import EngineSettings

    server = ServerThread(StandInVllm("some/model"))
    return VllmEngine(AttachedServer(EngineSettings(vllm_url=server.url)), vocab_size=VOCAB_SIZE)


MAKERS: dict[str, Callable[[Path], Engine]] = {
    "transformers": make_transformers,
    "remote": make_remote,
    "vllm": make_vllm,
}


# A process that imports torch takes its time: what is its own is held by test_engine_remote in the default suite.
NAMES = ["transformers", pytest.param("remote", marks=pytest.mark.slow), "vllm"]


@pytest.fixture(params=NAMES, scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def ask(prompt: list[int], **options: object) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, **{"max_tokens": 12, "sampling": GREEDY, **options})  # type: ignore[arg-type]


def test_answers_do_not_depend_on_their_neighbours(engine: Engine, adapters: list[Path]) -> None:
    loaded = [None, *(engine.load_adapter(folder) for folder in adapters)]
    batch = [ask(prompt, adapter=loaded[i % 4]) for i, prompt in enumerate(prompts(16, seed=1))]
    alone = [engine.submit(request).completion().token_ids for request in batch]
    assert [completion.token_ids for completion in generate_all(engine, batch)] == alone
    same_prompt = [ask(batch[0].prompt_ids, adapter=adapter) for adapter in loaded]  # type: ignore[arg-type]
    assert len({tuple(done.token_ids) for done in generate_all(engine, same_prompt)}) == 4


def test_a_seed_repeats_the_draws(engine: Engine) -> None:
    drawn = SamplingParams(temperature=1.0, seed=7)
    first, second = generate_all(engine, [ask(prompts(1, seed=2)[0], sampling=drawn) for _ in range(2)])
    assert first.token_ids == second.token_ids
    other = engine.submit(ask(prompts(1, seed=2)[0], sampling=SamplingParams(temperature=1.0, seed=8))).completion()
    assert other.token_ids != first.token_ids


def test_a_stop_id_is_the_last_token_and_counted(engine: Engine) -> None:
    prompt = prompts(1, seed=3)[0]
    whole = engine.submit(ask(prompt)).completion()
    assert (len(whole.token_ids), whole.finish) == (12, Finish("length", len(prompt), 12))
    stop = whole.token_ids[4]
    count = whole.token_ids.index(stop) + 1
    stopped = engine.submit(ask(prompt, stop_ids=frozenset([stop]))).completion()
    assert (stopped.token_ids, stopped.finish) == (whole.token_ids[:count], Finish("stop", len(prompt), count))


def test_the_context_holds_prompt_and_answer(engine: Engine) -> None:
    prompt = [10] * (engine.context_length - 3)
    done = engine.submit(ask(prompt, max_tokens=None)).completion()
    assert (len(done.token_ids), done.finish.reason) == (3, "length")
    with pytest.raises(PromptTooLong):
        engine.submit(ask([10] * engine.context_length))


@pytest.mark.parametrize(
    "wrong",
    [{"adapter": "sha256:none"}, {"max_tokens": 0}, {"prompt_ids": []}, {"prompt_ids": [10**6]}],
    ids=lambda value: next(iter(value)),
)
def test_what_can_be_refused_is_refused_when_it_is_submitted(engine: Engine, wrong: dict[str, object]) -> None:
    with pytest.raises(RequestRefused):
        engine.submit(GenerationRequest(**{"prompt_ids": [10], "max_tokens": 4, **wrong}))  # type: ignore[arg-type]


def test_an_abort_ends_the_stream_once_and_frees_its_place(engine: Engine) -> None:
    stream = engine.submit(ask([10], max_tokens=200))
    tokens = iter(stream)
    next(tokens)
    stream.abort()
    rest = list(tokens)
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.num_tokens) == ("abort", len(rest) + 1)
    stream.abort()
    engine.abort("never was")
    at_once = engine.submit(ask([11], max_tokens=200))
    at_once.abort()
    list(at_once)
    assert at_once.finish is not None
    assert at_once.finish.reason == "abort"
    assert engine.submit(ask([12], max_tokens=2)).completion().finish.reason == "length"


def test_an_adapter_stays_until_its_last_request_has_ended(engine: Engine, adapters: list[Path]) -> None:
    adapter = engine.load_adapter(adapters[0])
    expected = engine.submit(ask([20], adapter=adapter, max_tokens=60)).completion().token_ids
    stream = engine.submit(ask([20], adapter=adapter, max_tokens=60))
    tokens = iter(stream)
    begun = [next(tokens).id]
    engine.unload_adapter(adapter)
    assert adapter not in engine.adapters
    with pytest.raises(RequestRefused):
        engine.submit(ask([20], adapter=adapter))
    assert begun + [token.id for token in tokens] == expected
    assert engine.load_adapter(adapters[0]) == adapter
    assert engine.submit(ask([20], adapter=adapter, max_tokens=60)).completion().token_ids == expected


@pytest.mark.parametrize("name", NAMES)
def test_closing_ends_every_stream(name: str, tmp_path: Path) -> None:
    engine = MAKERS[name](tmp_path)
    streams = [engine.submit(ask([10 + n], max_tokens=240)) for n in range(4)]
    next(iter(streams[0]))
    ended: list[TokenStream] = []

    def read(stream: TokenStream) -> None:
        list(stream)
        ended.append(stream)

    readers = [threading.Thread(target=read, args=(stream,)) for stream in streams[1:]]
    for reader in readers:
        reader.start()
    engine.close()
    engine.close()
    for reader in readers:
        reader.join(30)
    assert len(ended) == 3
    with pytest.raises(EngineError):
        engine.submit(ask([10]))
    streams[0].abort()
