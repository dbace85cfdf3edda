"""What a decoder's shape alone says: parameters, adapter, KV cache, saved activations, floating-point operations.

No torch and no weights: ``config.json`` is enough. Operations count a multiply-add as two, of the model alone
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B): what is computed again, or for padding, doesn't
count.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen2", "qwen3", "llama")  # whose layers are counted below
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2-like decoder: ``layers`` of attention with ``kv_heads`` shared keys and a gated MLP."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True  # the output embedding is the input embedding
    qkv_bias: bool = True
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the keys of a ``config.json``.

        Raises:
            ValueError: another family's layers, or a key is missing.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model_type={family!r}: only the layers of {', '.join(FAMILIES)} are known; choose one")
        try:
            heads = config["num_attention_heads"]
            return cls(
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
            )
        except KeyError as error:
            raise ValueError(f"the configuration has no {error.args[0]}; give a transformers config.json") from error

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each linear layer of a decoder layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            **dict.fromkeys(_MLP[:2], (self.hidden, self.intermediate)),
            _MLP[2]: (self.intermediate, self.hidden),
        }

    def check_adapter(self, factors: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError where an adapter's factors, PEFT's name -> shape, fit no linear layer of this model.

        vLLM itself takes the part of them that fits, and says nothing.
        """
        for name, shape in factors.items():
            module, _, factor = name.partition(".lora_")
            width = self.linears.get(module.rpartition(".")[2])
            if width is None:
                continue  # whoever loads it knows which modules there are
            found, expected = (shape[-1], width[0]) if factor.startswith("A") else (shape[0], width[1])
            if found != expected:
                raise ValueError(
                    f"{name} is {tuple(shape)}, and the model's layer has {expected} where it has {found}: the adapter "
                    "was trained on another model"
                )

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return sum(a * b for a, b in self.linears.values()) + bias + norms

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied embedding once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """Of an adapter of ``rank`` on the linear layers ``targets``."""
        return self.layers * rank * sum(sum(self.linears[name]) for name in targets)

    def kv_bytes(self, bytes_per_value: int = 2) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def saved_bytes(self, rank: int, targets: Iterable[str], bytes_per_value: int = 2) -> int:
        """What one decoder layer keeps of one token for its backward, the base being frozen under an adapter.

        A frozen linear layer keeps nothing; a norm keeps its float32 input; attention keeps queries, keys, values and
        its output; the gated MLP keeps three products; an adapter keeps its input (shared by q, k, v) and A's output.
        """
        targets = set(targets)
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        mlp = 3 * self.intermediate
        inputs = self.hidden * bool(targets & {"q_proj", "k_proj", "v_proj"})
        inputs += self.hidden * bool(targets & set(_MLP[:2])) + self.intermediate * ("down_proj" in targets)
        values = attention + mlp + inputs + rank * len(targets)
        return 2 * 4 * self.hidden + values * bytes_per_value

    # ------------------------------------------------------------------------------------------------------ operations
    def _matmuls(self, rank: int, targets: Iterable[str]) -> tuple[int, int]:
        """Weights that a token is multiplied with in all layers: (base, adapter)."""
        base = self.layers * sum(a * b for a, b in self.linears.values())
        return base, self.lora_parameters(rank, targets)

    def _attention(self, lengths: Iterable[int]) -> float:
        """Operations of causal attention, forward: two products over half of each square."""
        return 2.0 * self.layers * self.heads * self.head_dim * sum(length**2 for length in lengths)

    def forward_flops(self, lengths: Iterable[int], scored: int, rank: int = 0, targets: Iterable[str] = ()) -> float:
        """Of a forward over sequences of ``lengths`` tokens, with logits for ``scored`` of the tokens."""
        lengths = list(lengths)
        head = 2.0 * scored * self.hidden * self.vocab
        return 2.0 * sum(self._matmuls(rank, targets)) * sum(lengths) + self._attention(lengths) + head

    def update_flops(self, lengths: Iterable[int], scored: int, rank: int = 0, targets: Iterable[str] = ()) -> float:
        """Of forward and backward: under an adapter (``rank`` > 0) base and embedding get no gradient, else all do."""
        lengths = list(lengths)
        base, adapter = self._matmuls(rank, targets)
        passes = 2 if rank else 3
        head = 2.0 * scored * self.hidden * self.vocab * passes
        return 2.0 * (passes * base + 3 * adapter) * sum(lengths) + 3 * self._attention(lengths) + head


def _qwen25(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: Any) -> ModelShape:
    return ModelShape(hidden, intermediate, layers, heads, kv_heads, 128, **{"vocab": 151_936, **other})


SHAPES: dict[str, ModelShape] = {
    "Qwen2.5-0.5B": ModelShape(896, 4864, 24, 14, 2, 64, 151_936),
    "Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2),
    "Qwen2.5-3B": _qwen25(2048, 11008, 36, 16, 2),
    "Qwen2.5-7B": _qwen25(3584, 18944, 28, 28, 4, vocab=152_064, tied=False),
}


def find_shape(model: str) -> ModelShape:
    """The shape of a folder with a ``config.json``, or of a name such as ``Qwen/Qwen2.5-3B-Instruct``.

    Raises:
        ValueError: neither is known.
    """
    file = Path(model) / "config.json"
    if file.is_file():
        return ModelShape.from_config(json.loads(file.read_text(encoding="utf-8")))
    name = model.rsplit("/", 1)[-1].removesuffix("-Instruct")
    if name not in SHAPES:
        raise ValueError(
            f"model {model!r} is no folder with a config.json and none of {', '.join(SHAPES)}; download its "
            "config.json and give the folder"
        )
    return SHAPES[name]
