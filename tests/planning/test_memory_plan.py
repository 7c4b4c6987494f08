"""Plans of memory: against counted passes, against real tensors, and as a command."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen3_5TextConfig
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.options import parse_size
from grpo_tasks.grpo.token_budget import with_token_budget
from grpo_tasks.kit import cards
from grpo_tasks.planning.live_memory import MASKED, LiveMemory, cuda_kernels
from grpo_tasks.planning.memory_plan import GIB, GRAPHS, Groups, count_pass, meta_policy, stage_plans
from grpo_tasks.policy.folded_adapter import causal_model
from grpo_tasks.policy.load import load_base, load_tokenizer, trainable_policy
from grpo_tasks.rollout.decoding_loop import sample_tokens
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.graphs import MOST_GRAPHS
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.load import load_config
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.results.model import ModelRef
from tests.attention.reference_kernel import masked_way
from tests.benchmarks import counts
from tests.benchmarks.count_decode import GPU
from tests.benchmarks.shapes import HYBRIDS, PERIOD, SHAPES
from tests.benchmarks.tapes import Tapes
from tests.zoo import build as zoo


@pytest.fixture
def shape(tmp_path):
    """A folder with the config of a model of that shape, and no weights."""

    def write(name):
        if name in HYBRIDS:
            config = Qwen3_5TextConfig(**HYBRIDS[name]).to_dict()
        else:
            config = counts.architecture(SHAPES[name]["num_hidden_layers"]).to_dict() | SHAPES[name]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def grpo(*words):
    found = CliRunner().invoke(app, ["plan", *map(str, words)])
    return found.exit_code, " ".join(found.output.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "model", "memory"),
    [
        pytest.param("gsm8k-qwen2.5-0.5b", "qwen2.5-0.5b", "8GB", marks=pytest.mark.ci),
        ("gsm8k-qwen2.5-0.5b-vllm", "qwen2.5-0.5b", "8GB"),
        ("gsm8k-qwen2.5-1.5b", "qwen2.5-1.5b", "40GB"),
        ("gsm8k-qwen2.5-1.5b-vllm", "qwen2.5-1.5b", "40GB"),
        ("gsm8k-qwen2.5-1.5b-4gpu", "qwen2.5-1.5b", "40GB"),
        ("gsm8k-qwen3.5-0.8b", "qwen3.5-0.8b", "8GB"),
        ("gsm8k-qwen3.5-0.8b-vllm", "qwen3.5-0.8b", "8GB"),
        ("gsm8k-qwen3.5-2b", "qwen3.5-2b", "16GB"),
        ("gsm8k-qwen3.5-2b-vllm", "qwen3.5-2b", "16GB"),
        ("gsm8k-qwen3.5-4b", "qwen3.5-4b", "24GB"),
        ("gsm8k-qwen3.5-4b-vllm", "qwen3.5-4b", "24GB"),
    ],
)
def test_presets_fit_the_card_that_they_name(preset, model, memory, shape):
    settings = load_config(preset, [f"model.path={shape(model)}"])
    for plan in stage_plans(settings, parse_size(memory))[:1]:
        assert plan.fits
        assert plan.pass_tokens >= settings.validation.max_prompt_length + settings.rollout.max_completion_length


@pytest.mark.slow
def test_two_nodes_of_a_cluster_are_planned_like_two_processes(shape):
    def sampling(*settings):
        config = load_config(
            "gsm8k-qwen2.5-0.5b", [f"model.path={shape('qwen2.5-0.5b')}", "rollout.max_batch_size=4096", *settings]
        )
        return stage_plans(config, parse_size("80GB"))[0].sampling

    on_nodes = sampling("resources.cluster.engine=ray", "resources.cluster.num_nodes=2")
    assert on_nodes == sampling("resources.num_processes=2")
    assert on_nodes != sampling()


@pytest.mark.long
def test_prompts_that_an_environment_begins_with_count_up_to_their_limit(shape):
    def planned(*settings):
        return stage_plans(load_config("gsm8k-qwen2.5-0.5b", [f"model.path={shape('qwen2.5-0.5b')}", *settings]), 80 * GIB)[0]

    limits = ["interaction.max_tokens=2000", "interaction.max_prompt_tokens=3000"]
    tools = planned('interaction.tools=["my_tools:add"]', *limits)
    played = planned("interaction.environment=my_game:Game", *limits)
    assert (tools.prompt_length, played.prompt_length) == (planned().prompt_length, 3000)
    tight = replace(played, memory=played.reserve + sum(item.bytes for item in played.standing) + played.update(4_000))
    assert (replace(tools, memory=tight.memory).fitting_tokens > 0, tight.fitting_tokens) == (True, 0)


@pytest.mark.long
def test_a_stage_that_does_not_fit_is_refused_with_a_fix(shape):
    settings = ("gsm8k-qwen2.5-1.5b", "--set", f"model.path={shape('qwen2.5-1.5b')}", "--memory")
    code, text = grpo(*settings, "40GB", "--set", "stages.0.max_tokens_per_microbatch=null")
    assert code == 1
    assert "does not fit" in text
    assert "fix: max_tokens_per_microbatch: auto" in text
    code, text = grpo(*settings, "10GB")
    assert code == 1
    assert "fix: model.gradient_checkpointing: true" in text
    assert grpo(*settings, "10GB", "--set", "model.gradient_checkpointing=true")[0] == 0


def test_shards_without_room_for_a_copy_are_planned_with_servers():
    sharded = ["resources.num_processes=4", "resources.fsdp=true"]
    servers = ["rollout.engine=vllm", "rollout.vllm.base_urls=[http://server:8000]"]
    needed = [stage_plans(load_config("demo", [*sharded, *more]), 80 * GIB)[0].needed for more in ([], servers)]
    memory = sum(needed) / 2
    code, text = grpo("demo", "--memory", f"{memory / 1e6:.3f}MB", *(word for setting in sharded for word in ("--set", setting)))
    assert code == 1
    assert "fix: rollout.engine: vllm with rollout.vllm.base_urls" in text


def test_the_plan_of_the_demo_is_a_command(tmp_path):
    code, text = grpo("demo", "--memory", "4GiB")
    assert code == 0
    assert "Stage format" in text
    assert "It fits into 4.0 GiB" in text


def test_a_plan_ends_with_the_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cards, "cards_here", lambda: cards.Cards(1, "535.104.05"))
    code, text = grpo("demo", "--memory", "4GiB", "--set", "resources.device=auto")
    assert code == 1
    assert "It fits into 4.0 GiB" in text
    assert "the driver is 535.104.05" in text
    assert grpo("demo", "--memory", "4GiB", "--set", "resources.device=cpu")[0] == 0


@pytest.mark.parametrize("text", ["12", "GB", "0GB", "1e9GB", "-3GB", "3 PB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="size of memory"):
        parse_size(text)


def assert_foretells_passes(plan, sizes=counts.SIZES):
    assert max(map(abs, counts.plan_errors(plan, sizes))) < 0.03
    fitting = plan.fitting_tokens
    assert plan.update(fitting) <= plan.available < plan.update(fitting + 2)


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_plan_foretells_passes_of_every_size(checkpointing):
    architecture = counts.architecture(2, "qwen2.5-0.5b")
    assert_foretells_passes(counts.plan_of(architecture, gradient_checkpointing=checkpointing), ((1, 3), (1, 18), (4, 14)))


@pytest.mark.long
def test_the_plan_foretells_passes_of_a_hybrid():
    plan = counts.plan_of(counts.architecture(PERIOD, "qwen3.5-0.8b"), gradient_checkpointing=True)
    assert_foretells_passes(plan, ((1, 3), (2, 16)))


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [True, False])
def test_padding_of_layers_with_a_state_takes_the_memory_of_tokens(checkpointing):
    plan = counts.plan_of(counts.architecture(PERIOD, "qwen3.5-0.8b"), gradient_checkpointing=checkpointing)
    groups = Groups([40, 256], [[32 + 60 * index for index in range(6)], [400 - 60 * index for index in range(6)]])
    found, with_padding = count_pass(plan._policy, groups).peak, 12 * 400 + 2 * 256
    assert 1.2 * plan.update(groups.tokens) < found < plan.update(with_padding) < 1.1 * found


@pytest.mark.parametrize("model", [{}, pytest.param({"lora": None}, marks=pytest.mark.slow)], ids=["adapter", "all weights"])
def test_a_pass_with_less_than_a_chunk_of_logits_is_planned(model):
    # At this vocabulary a chunk has 2,048 rows.
    architecture = Qwen2Config(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32_000,
    )  # fmt: skip
    plan = counts.plan_of(architecture, gradient_checkpointing=True, **model)
    short = replace(plan, prompt_length=100, rollout=plan.rollout.model_copy(update={"max_completion_length": 200}))
    for each, sizes in ((plan, ((1, 1), (1, 2), (1, 3))), (short, ((1, 1), (1, 5), (1, 10), (1, 11), (2, 10)))):
        assert max(map(abs, counts.plan_errors(each, sizes))) < 0.03
        for tokens in (each.prompt_length + each.rollout.max_completion_length + 2, 2000, 5000):
            room = replace(each, taken=each.available - each.update(tokens))
            assert room.fitting_tokens == pytest.approx(tokens, abs=1)


def test_an_entropy_bonus_takes_more_of_the_head():
    architecture = counts.architecture(1, "qwen2.5-0.5b")
    bonus, none = (counts.plan_of(architecture, gradient_checkpointing=True, entropy_coef=weight) for weight in (0.01, 0.0))
    assert_foretells_passes(bonus, ((1, 3), (1, 18)))
    assert bonus.update(3_000) > 2 * none.update(3_000)


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", [pytest.param("qwen2.5-0.5b", marks=pytest.mark.ci), "qwen2.5-1.5b"])
def test_the_plan_of_a_real_shape_foretells_passes_of_every_size(name, checkpointing, sharded):
    resources = ResourcesConfig(num_processes=2, fsdp=True) if sharded else None
    architecture = counts.architecture(SHAPES[name]["num_hidden_layers"], name)
    plan = counts.plan_of(architecture, resources=resources, gradient_checkpointing=checkpointing)
    assert_foretells_passes(plan)
    mixed = count_pass(meta_policy(architecture, plan.model), Groups([200, 500], [[700, 900, 1100], [300] * 8]))
    assert plan.update(mixed.tokens) == pytest.approx(mixed.peak, rel=0.03)


def test_head_and_layers_of_a_pass_are_counted_apart():
    # A wide head over narrow layers, and the other way round: chunks of logits, or gradients of a layer, are the peak.
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    for vocabulary, width, largest in ((151_936, 96, "head"), (64, 9_600, "layers")):
        found = count_pass(
            meta_policy(Qwen2Config(**small, vocab_size=vocabulary, intermediate_size=width), ModelConfig()),
            Groups.equal(2, 40, 4, 300),
        )
        assert found.peak == max(found.head, found.layers) == getattr(found, largest)
        assert min(found.head, found.layers) < 0.7 * found.peak


def test_planned_weights_are_those_of_the_model():
    settings = load_config("demo", [])
    [plan, _] = stage_plans(settings, GIB)
    base = load_base(ModelRef(path=settings.model.path), settings.model, device=torch.device("cpu"))
    items = {item.what: item.bytes for item in plan.standing}
    assert items["frozen weights"] == sum(parameter.nbytes for parameter in base.parameters())
    assert items["optimizer"] == 2 * items["trained weights"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("targets", "fuse"),
    [(["q_proj", "v_proj"], True), (["q_proj", "v_proj"], False), ("all-linear", True), ("all-linear", False)],
)
def test_the_planned_copy_to_sample_from_is_what_the_engine_takes(targets, fuse, dtype):
    model = ModelConfig(dtype=dtype, lora={"target_modules": targets})
    settings = load_config("demo", [])
    settings = settings.model_copy(
        update={"model": model, "resources": settings.resources.model_copy(update={"fuse_kernels": fuse})}
    )
    planned = {item.what: item.bytes for item in stage_plans(settings, GIB)[0].standing}["copy to sample from"]
    ref = ModelRef(path="embedded:base")
    policy = trainable_policy(ref, model, device=torch.device("cpu"), seed=1)
    engine = LocalEngine(policy, load_tokenizer(ref), fuse_kernels=fuse)
    engine.generate([Request([5, 6, 7], 0)], Sampling.of(RolloutConfig(max_completion_length=2)))
    assert (engine._fused is not None) == fuse
    held = list(engine._model.parameters())
    for layer in engine._fused._layers if fuse else ():
        held += [tensor for stack in (layer.qkv, layer.gate_up) for tensor in (stack.weight, stack.up) if tensor is not None]
    shared = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    taken = sum(size for place, size in storages.items() if place not in shared)
    assert planned == pytest.approx(taken, rel=1e-3)


def planned(*settings):
    """What stands and what sampling takes in the first stage of the demo."""
    plan = stage_plans(load_config("demo", list(settings)), GIB)[0]
    return [{item.what: item.bytes for item in items} for items in (plan.standing, plan.sampling)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cards", "charged"),
    [
        ([], 4, True),
        (["replicas=3"], 4, False),
        (["replicas=3"], 0, False),
        (["replicas=4"], 4, True),
        (["replicas=2", "tensor_parallel_size=2"], 4, True),
        (['devices=["1"]'], 4, False),
    ],
    ids=str,
)
def test_servers_with_cards_of_their_own_take_nothing_from_the_trainers(settings, cards, charged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    vllm = ["rollout.engine=vllm", *(f"rollout.vllm.{setting}" for setting in settings)]
    assert ("vLLM server" in planned(*vllm)[0]) == charged
    assert "vLLM server" not in planned(*vllm, "resources.cluster.engine=ray", "resources.cluster.num_nodes=2")[0]


@pytest.fixture
def five_layers(tmp_path):
    """The setting of a small model with five layers and a large vocabulary, and the model on the meta device."""
    config = Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        return f"model.path={tmp_path}", AutoModelForCausalLM.from_config(config)


def test_a_sharded_model_has_room_for_the_layers_that_are_gathered(five_layers):
    path, model = five_layers
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in (model, *model.model.layers)]
    complete = sizes[0] - 2 * sizes[1]
    what, sharded = "gathered weights", ["resources.num_processes=2", "resources.fsdp=true"]
    assert planned(path, "model.lora=null", *sharded)[0][what] == 8 * complete
    assert 4 * complete < planned(path, *sharded)[0][what] < 5 * complete
    assert what not in planned(path, "resources.num_processes=2")[0]


def test_full_fine_tuning_is_planned_to_sample_in_float32():
    full = planned("model.lora=null", "model.dtype=bfloat16")
    assert full[1] == planned("model.dtype=float32")[1] != planned("model.dtype=bfloat16")[1]


class Converted(LiveMemory):
    """Counts as well what torch converts before it sums in float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(function, types, args, kwargs)
        if function._schema.name == "aten::sum" and made.dtype == torch.float64:
            self.peak = max(self.peak, self.now + 8 * args[0].numel())
        return made


CHANGED = {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize("settings", [{}, CHANGED, CHANGED | {"top_p": 0.9}], ids=str)
def test_a_step_that_draws_on_a_card_takes_the_planned_logits(five_layers, settings):
    path, model = five_layers
    (cached, _), (_, logits), _ = planned(path, *(f"rollout.{name}={value}" for name, value in settings.items()))[1].items()
    rows, sampling = int(cached.split()[-2]), Sampling.of(RolloutConfig(**settings))

    def draw(count):
        given = torch.empty(count, model.config.vocab_size, dtype=torch.bfloat16, device="meta")
        seen = torch.empty(count, model.config.vocab_size, dtype=torch.bool, device="meta") if settings else None
        uniform = torch.empty(count, dtype=torch.float64, device="meta")
        sample_tokens(given, uniform, sampling, seen)

    draw(1)  # makes the triangles of ones, which are kept
    with Converted() as memory:
        draw(rows)
    assert 0.85 * logits < memory.peak <= 1.01 * logits


@pytest.mark.parametrize("length", [20, 65, 200])
def test_a_card_with_room_keeps_what_sampling_needs(length):
    plan = replace(stage_plans(load_config("demo", []), GIB)[0], prompt_length=length)
    needed = sum(item.bytes for item in plan.sampling)
    assert (plan.kept, replace(plan, memory=10 * needed).kept) == (needed, 0.0)
    assert plan.available == GIB - plan.reserve - needed - sum(item.bytes for item in plan.standing)
    ref = ModelRef(path="embedded:base")
    policy = load_base(ref, plan.model, device=torch.device("cpu"))
    engine = LocalEngine(policy, load_tokenizer(ref), capture=Tapes(), kept_bytes=plan.kept_values)
    engine._buckets, engine._end_ids = GPU, frozenset(range(policy.config.vocab_size))
    rows, group = int(plan.sampling[0].what.split()[-2]), plan.stage.num_generations
    requests = [Request([row // group] * length, row) for row in range(rows)]
    engine.generate(requests, Sampling.of(plan.rollout))
    engine.sleep()
    assert 0.5 * plan.kept_values < engine._graphs.num_bytes <= plan.kept_values == plan.sampling[0].bytes
    assert replace(plan, memory=10 * needed).kept_values == 0.0


def test_later_turns_of_a_conversation_have_a_context_for_each_row():
    single = replace(stage_plans(load_config("demo", []), 8 * GIB)[0], prompt_length=40)
    turn, said = single.rollout.max_completion_length, 200
    plan = replace(single, rollout=single.rollout.model_copy(update={"max_completion_length": said}), turn_length=turn)
    rows = int(plan.sampling[0].what.split()[-2])
    ref = ModelRef(path="embedded:base")
    policy = load_base(ref, plan.model, device=torch.device("cpu"))
    engine = LocalEngine(policy, load_tokenizer(ref), capture=Tapes(), kept_bytes=plan.kept_values)
    engine._buckets, engine._end_ids = GPU, frozenset(range(policy.config.vocab_size))
    # The longest contexts that have room for a token, and one that has room for a whole turn.
    lengths = [40, *[40 + said - 1] * (rows - 1)]
    requests = [Request([row] * length, row, 40 + said - length) for row, length in enumerate(lengths)]
    engine.generate(requests, Sampling.of(single.rollout))
    engine.sleep()
    assert max(single.kept_values, 0.5 * plan.kept_values) < engine._graphs.num_bytes <= plan.kept_values
    # What the turn after it begins with.
    contexts = sum(each.nbytes for name, each in engine._graphs._memory.items() if name.startswith(("keys", "values")))
    assert contexts / 1.5 <= plan.sampling[-1].bytes <= contexts


def test_graphs_of_the_plan_are_those_that_the_engine_keeps():
    assert GRAPHS == MOST_GRAPHS
    one, two = (counts.plan_of(counts.architecture(layers, "qwen2.5-0.5b")) for layers in (1, 2))
    items = [next(item for item in plan.sampling if "graphs" in item.what) for plan in (one, two)]
    assert items[1].bytes == 2 * items[0].bytes > 0
    assert one.kept >= items[0].bytes


def test_live_memory_follows_tensors_from_their_first_to_their_last_use():
    weight = torch.empty(10, 10, device="meta")
    with LiveMemory() as memory:
        one = torch.empty(100, device="meta")  # 400 bytes
        two = one + 1
        view = two.view(10, 10)
        assert (memory.now, memory.kernels) == (800, 1)
        del one, two
        assert memory.now == 400
        product = view @ weight
        del view
    assert (memory.now, memory.peak) == (400, 800)
    assert product.shape == (10, 10)


def test_a_pass_that_waits_for_a_number_is_an_error():
    with LiveMemory(), pytest.raises(RuntimeError, match="meta"):
        torch.empty(3, device="meta").sum().item()


@pytest.mark.slow
def test_counts_of_an_update_stay_within_their_limits():
    # Four layers, because the fixed part is small against them; the benchmark counts all 28.
    two, four = (counts.count(layers, counts.MIXED) for layers in (2, 4))
    saved = (four.saved - two.saved) / 2 / two.tokens * counts.SHAPE["num_hidden_layers"]
    assert saved < 1.6 * counts.MIB
    assert counts.LAYERS * (four.kernels - two.kernels) / 2 <= 4500
    assert two.tokens == counts.MIXED.tokens  # no padding
    assert two.attention == {"flash": 2}
    assert counts.head_kernels() <= 250
    checkpointed = [counts.count(layers, counts.MIXED, gradient_checkpointing=True) for layers in (2, 4)]
    assert (checkpointed[1].saved - checkpointed[0].saved) / 2 / two.tokens * 28 < 0.10 * counts.MIB


@pytest.mark.slow
def test_a_row_of_the_second_table_is_what_all_layers_give():
    groups = Groups.equal(2, 512, 4, 64)
    row = counts.pass_row("qwen2.5-0.5b", 16, 4, "64", groups)
    whole = counts.count(24, groups, shape="qwen2.5-0.5b", rank=16)
    assert row.saved_mib == pytest.approx(whole.saved / whole.tokens / counts.MIB)
    assert row.attention == whole.attention == {"flash": 24}
    assert (row.padding_share, row.prompt_share) == (1.0, 1.0)


@pytest.mark.long
def test_host_and_gpu_wait_for_each_other_as_the_page_says():
    waits = counts.count_waits()
    assert waits["pass"]["host"] == {}
    # The figures and the norm of the gradient are read once; the GPU then waits for the optimizer's work.
    assert [line.partition(":")[0] for line in waits["update"]["host"]] == ["measure.py", "learner.py"]
    assert [line.partition(":")[0] for line in waits["update"]["gpu"]] == ["pinned.py", "learner.py", "learner.py"]
    # The GPU has steps to compute while the host reads the tokens of those before them.
    assert "decoding_loop.py" not in "".join(waits["rollout"]["gpu"])
    assert counts.pageable(waits) == {}
    page = (counts.ROOT / "docs/benchmarks.md").read_text()
    for row in counts.wait_rows(waits):
        assert row.now <= row.limit
        assert f"| {row.figure} | {row.now:,.4g} |" in page


def test_an_optimizer_step_on_a_card_takes_a_handful_of_kernels():
    assert counts.optimizer_kernels() <= 12


def gemma(dtype):
    """Every other layer has a window, and the prompts are longer than it."""
    architecture = Gemma3TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=328, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return meta_policy(architecture, ModelConfig(dtype=dtype))


def test_dense_masks_are_counted_where_a_pass_has_them(monkeypatch):
    groups = Groups.equal(2, 40, 4, 30)
    policy = gemma("bfloat16")
    found = count_pass(policy, groups)
    assert (found.attention, found.masks) == ({"flash": 2}, 0)
    # One padded row for each completion, with a mask as transformers builds it for a window or for padding.
    rows, mask = torch.zeros(8, 70, dtype=torch.long, device="meta"), torch.zeros(8, 1, 70, 70, dtype=torch.bool, device="meta")
    with cuda_kernels() as calls:
        causal_model(policy)(input_ids=rows, attention_mask=mask, use_cache=False)
    assert calls.found == {f"efficient{MASKED}": 2}
    masked_way(monkeypatch)
    found = count_pass(policy, groups)
    assert found.attention == {f"efficient{MASKED}": 4}  # prompts and completions of two layers
    assert found.masks == 4


def test_float32_asks_for_the_efficient_kernel():
    assert count_pass(meta_policy(counts.architecture(1), ModelConfig()), Groups.equal(1, 9, 2, 5)).attention == {"efficient": 1}


def spec_of(tmp_path, **stage):
    settings = load_config("demo", [])
    given = settings.stages[0].model_copy(update=stage)
    return StageSpec(
        key="k", stage=given, seed=1, model=settings.model, start=ModelRef(path=settings.model.path), rewards=settings.rewards,
        rollout=settings.rollout, resources=settings.resources, train=tmp_path / "train.parquet",
    )  # fmt: skip


def test_auto_takes_what_the_card_holds_and_limits_nothing_on_a_cpu(tmp_path):
    spec = spec_of(tmp_path, max_tokens_per_microbatch="auto")
    policy = load_base(ModelRef(path="embedded:base"), ModelConfig(), device=torch.device("cpu"))
    assert with_token_budget(spec, policy, 40).max_tokens_per_microbatch is None
    small, large = (with_token_budget(spec, policy, 40, size * GIB).max_tokens_per_microbatch for size in (2, 4))
    assert 1000 < small < large
    assert with_token_budget(spec_of(tmp_path, max_tokens_per_microbatch=77), policy, 40, GIB).max_tokens_per_microbatch == 77
    with pytest.raises(ModelError, match="does not fit into 1 GiB"):
        with_token_budget(spec, policy, 40, GIB)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])
def test_planned_keys_and_states_are_those_that_the_engine_keeps(kind, tmp_path):
    zoo.save(kind, tmp_path)
    sizes = {"rollout.max_batch_size": 8, "rollout.max_completion_length": 64, "validation.max_prompt_length": 40}
    settings = [f"model.path={tmp_path}", "model.lora.target_modules=all-linear"]
    plan = stage_plans(load_config("demo", [*settings, *(f"{name}={value}" for name, value in sizes.items())]), GIB)[0]
    ref, model = ModelRef(path=str(tmp_path)), plan.model
    policy = trainable_policy(ref, model, device=torch.device("cpu"), seed=1)
    # The capture keeps the memory in its place, as on a card.
    engine = LocalEngine(policy, load_tokenizer(ref), capture=lambda step: step)
    engine.generate([Request(list(range(5, 45)), seed) for seed in range(8)], Sampling.of(plan.rollout))
    # The plan has room for the padding of contexts.
    assert engine._graphs.num_bytes <= plan.sampling[0].bytes < 1.6 * engine._graphs.num_bytes
