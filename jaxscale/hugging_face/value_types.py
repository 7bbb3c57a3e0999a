"""Type checks of the values of a config.json, made before a reader would end in a traceback, or
take a null for a default."""

import sys
from collections.abc import Mapping
from typing import Any

SIZE = "a whole number above 0"
WHOLE = "a whole number, 0 or more"
NUMBER = "a number"
POSITIVE = "a number above 0"
BOOL = "true or false"
TEXT = "text"
LIST = "a list"
NUMBERS = "a list of numbers"
MAPPING = "a mapping of names to values"

_KEYS = {
    SIZE: "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings "
    "n_embd n_head n_layer n_inner n_positions d_model d_ff d_kv num_layers num_decoder_layers "
    "num_heads relative_attention_num_buckets relative_attention_max_distance type_vocab_size "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim kv_lora_rank n_group topk_group num_experts "
    "num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size "
    "decoder_sparse_step sliding_window_pattern _sliding_window_pattern",
    WHOLE: "sliding_window max_window_layers q_lora_rank n_shared_experts first_k_dense_replace "
    "mask_token_id num_nextn_predict_layers",
    NUMBER: "rms_norm_eps layer_norm_eps layer_norm_epsilon query_pre_attn_scalar "
    "attn_logit_softcapping final_logit_softcapping swiglu_limit router_aux_loss_coef "
    "routed_scaling_factor attention_factor beta_fast beta_slow mscale mscale_all_dim",
    POSITIVE: "rope_theta rope_local_base_freq rotary_emb_base rotary_pct partial_rotary_factor "
    "factor low_freq_factor high_freq_factor",
    BOOL: "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob "
    "scale_attn_weights scale_decoder_outputs use_parallel_residual token_dropout "
    "emb_layer_norm_before truncate",
    TEXT: "hidden_act hidden_activation activation_function feed_forward_proj rope_type type",
    LIST: "layer_types mlp_only_layers",
    NUMBERS: "short_factor long_factor",
    MAPPING: "rope_parameters rope_scaling full_attention sliding_attention",
}
TYPES = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
"""Key -> type, for keys with one meaning in every family, including keys of nested mappings."""

# Keys for which null equals a missing key, here and in some version of transformers.
_OR_NULL = (
    "num_key_value_heads head_dim original_max_position_embeddings n_inner num_decoder_layers "
    "sliding_window sliding_window_pattern _sliding_window_pattern q_lora_rank mask_token_id "
    "attn_logit_softcapping final_logit_softcapping attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim factor token_dropout emb_layer_norm_before hidden_act hidden_activation "
    "activation_function rope_type type layer_types mlp_only_layers rope_parameters rope_scaling "
    "full_attention sliding_attention num_nextn_predict_layers"
)
OR_NULL = frozenset(_OR_NULL.split())


def check_value_types(hf: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuses values of the wrong type; converts none.

    Args:
      where: the file, for messages.

    Raises:
      ValueError: names the key, its value and the allowed type.
    """
    for key, value in hf.items():
        kind = TYPES.get(key)
        null = key in OR_NULL
        if kind is None or (null and value is None):
            continue
        if not _is(value, kind):
            raise ValueError(
                f"{where} has {key} = {value!r}; it can be {kind}{' or null' if null else ''}"
            )
        if kind == MAPPING:
            check_value_types(value, f"{where}: {key}")


def _is(value: object, kind: str) -> bool:
    if kind in (SIZE, WHOLE):
        return type(value) is int and (kind == SIZE) <= value < 2**63
    if kind in (NUMBER, POSITIVE):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return abs(value) <= sys.float_info.max and (value > 0 or kind == NUMBER)
    if kind == NUMBERS:
        return isinstance(value, list | tuple) and all(_is(one, NUMBER) for one in value)
    types: dict[str, Any] = {BOOL: bool, TEXT: str, LIST: list | tuple, MAPPING: Mapping}
    return isinstance(value, types[kind])
