"""docs/dev/add-a-optimizer.md, followed for Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

import pytest

from tests.recipes.copied_tree import GATES, PROOF_S, CopiedTree, narrowed, proof_of

RULE = '''class _Lion:
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    def __init__(
        self,
        config: OptimizerConfig,
        masters: Mapping[str, Tensor],
        moments: Moments,
        traits: Mapping[str, Traits],
        copies: Mapping[str, Tensor],
    ) -> None:
        self._config, self._masters, self._moments = config, masters, moments
        self._traits, self._copies = traits, copies
        self.steps = 0
        self.decoupled_lr = config.decoupled_lr or config.lr
        self._weight_decay = config.weight_decay

    def set_weight_decay(self, weight_decay: float) -> None:
        self._weight_decay = weight_decay

    def step(self, lr: float, divisor: float, gradients: Mapping[str, Tensor]) -> None:
        self.steps += 1
        for name, master in self._masters.items():
            momentum, gradient = self._moments["exp_avg"][name], gradients[name] / divisor
            update = momentum.lerp(gradient, 1.0 - self._config.lion_beta1).sign_()
            rate = self._traits[name].rate(lr, self.decoupled_lr)
            if self._traits[name].decays:
                master.mul_(1.0 - rate * self._weight_decay)
            master.sub_(update, alpha=rate)
            momentum.lerp_(gradient, 1.0 - self._config.lion_beta2)
            if name in self._copies:
                self._copies[name].copy_(master)


'''
PLAIN = '''class PlainLion(torch.optim.Optimizer):
    """Lion as in the paper: torch has none of its own."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for copy in group["params"]:
                momentum = self.state[copy].setdefault("momentum", torch.zeros_like(copy))
                update = torch.sign(0.95 * momentum + 0.05 * copy.grad)
                copy.copy_(copy - 0.01 * (update + group["weight_decay"] * copy))
                momentum.copy_(0.98 * momentum + 0.02 * copy.grad)


'''
CHOICE = """\
    if kind == "lion":
        return copies, PlainLion(groups, {"weight_decay": 0.0})
"""
TESTS = "tests/trainer/optimizer"


@pytest.fixture
def with_lion(tree: CopiedTree) -> CopiedTree:
    """The copy after all steps of the page; Lion has no op."""
    section = "trainer/config/sections/optimizer.py"
    tree.change(section, 'Literal["adam", "sgd"] =', 'Literal["adam", "sgd", "lion"] =')
    tree.add_after(
        section,
        '    """Momentum of SGD; 0 disables it."""',
        '    lion_beta1: float = Field(0.95, ge=0.0, lt=1.0)\n    """Share of the momentum in the update of Lion."""\n'
        '    lion_beta2: float = Field(0.98, ge=0.0, lt=1.0)\n    """Decay of the momentum of Lion."""',
    )
    tree.add_after(
        section,
        '            return ("exp_avg", "exp_avg_sq")',
        '        if self.optimizer == "lion":\n            return ("exp_avg",)',
    )
    masters = "trainer/optimizer/masters.py"
    tree.change(masters, "self._step: _AdamW | _SGD\n", "self._step: _AdamW | _SGD | _Lion\n")
    tree.add_after(
        masters,
        "            self._step = _AdamW(config, masters, moments, traits, kernels, copies)",
        '        elif config.optimizer == "lion":\n'
        "            self._step = _Lion(config, masters, moments, traits, copies)",
    )
    tree.change(masters, "def _kinds(", f"{RULE}def _kinds(")
    tree.change("trainer/config/unsupported_flags.py", "        lion-beta1 lion-beta2 muon-", "        muon-")
    tree.change(f"{TESTS}/test_optimizer.py", "def reference(", f"{PLAIN}def reference(")
    tree.change(
        f"{TESTS}/test_optimizer.py",
        "    return copies, torch.optim.AdamW(",
        f"{CHOICE}    return copies, torch.optim.AdamW(",
    )
    tree.change(f"{TESTS}/test_optimizer.py", '("kind", ["adam", "sgd"])', '("kind", ["adam", "sgd", "lion"])')
    for file in ("test_offload.py", "test_distributed_optimizer.py"):
        path = f"{TESTS}/{file}"
        sgd = next(line for line in tree.text(path).splitlines() if line.startswith("SGD = "))
        tree.add_after(path, sgd, 'LION = {"optimizer": "lion", "lr": 0.001, "weight_decay": 0.1, "clip_grad": 0.0}')
        tree.change_all(path, '[SGD, ADAM], ids=["sgd", "adam"]', '[SGD, ADAM, LION], ids=["sgd", "adam", "lion"]')
    tree.run(".venv/bin/python -m scripts.reference")
    return tree


def test_lion_passes_its_proof_on_one_rank(with_lion: CopiedTree) -> None:
    with_lion.check_format()
    assert "| `--lion-beta1` | meant | `optimizer.lion_beta1` |" in with_lion.text("docs/reference/megatron-flags.md")
    optimizer = proof_of("add-a-optimizer")[0]
    # Several ranks train in the proof.
    names = "(lion and not unsharded) or page"
    with_lion.run(narrowed(f"{optimizer} tests/trainer/config/test_megatron_flags.py", names))


@pytest.mark.proof
@pytest.mark.timeout(PROOF_S)
def test_lion_passes_its_proof_and_the_gates(with_lion: CopiedTree) -> None:
    for command in proof_of("add-a-optimizer"):
        with_lion.run(command, limit_s=PROOF_S)
    with_lion.prove(f"{GATES} tests/trainer/config tests/trainer/planning")
