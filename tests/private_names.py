"""Every private or undocumented name of another library that the package uses, and the reason.

test_private_names.py checks that each still exists, is still used, and that none is missing here. Remove a name when
there is a public one; add a name only where there is none.
"""

_HOOK = "transformers documents it as the place where a model class says this"
_TOKENIZER = "a Python tokenizer of transformers is defined by overriding it"
_CHECKPOINT = (
    "checkpoints are exact and hold no pickle; the public callbacks run after transformers has written its own"
)

PRIVATE_NAMES = {
    # argparse
    "argparse.ArgumentParser._actions": "a completion changes its copy of the arguments; nothing public lists them",
    "argparse.ArgumentParser._option_string_actions": "the flags of a parser; nothing public lists them",
    # torch
    "torch._C._are_functorch_transforms_active": "kernels cannot read tensors of torch.func; nothing public tells",
    "torch._C._len_torch_dispatch_stack": "a fast step must not hide operations from a dispatch mode; likewise",
    "torch._C._is_any_autocast_enabled": "asked before each step; the public function takes microseconds",
    "torch._C._get_tracing_state": "likewise, as nn.Module asks it before each call",
    "torch._foreach_copy_": "one launch copies all inputs of a CUDA graph; the public copy_ takes one tensor each",
    "torch.utils._python_dispatch": "records the operations of one step; torch documents the mode, but no public path",
    "torch._ops.OpOverload._schema": "whether an operation writes to its arguments; nothing public tells",
    "torch.ops.aten._to_copy": "an operation as torch names it; likewise those below",
    "torch.ops.aten._conj_physical": "likewise",
    "torch.ops.aten._log_softmax_backward_data": "likewise",
    "torch.ops.aten._unsafe_view": "likewise",
    "torch.ops.aten._softmax": "likewise",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "likewise",
    "torch.ops.aten._assert_tensor_metadata": "likewise",
    "torch._higher_order_ops.scan": "a loop inside an exported program has no public name yet",
    "torch._inductor.aoti_compile_and_package": "the documented way to AOTInductor has no other name",
    "torch._inductor.aoti_load_package": "likewise",
    "torch.Tensor._base": "a view of a parameter is no kept activation; storages do not tell who owns them",
    "torch.Tensor._indices": "rows of a gradient that is not coalesced; indices() and values() take coalesced ones",
    "torch.Tensor._values": "likewise",
    "torch.Tensor._version": "a kept hash ends when a weight changes in place; nothing public counts changes",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors without memory; torch documents the mode, at this path",
    "torch.utils._python_dispatch._disable_current_modes": "a unit is examined with values while a model has none",
    "torch.utils._pytree.tree_map_only": "the results of an operation, however nested; torch's modes use it",
    "torch.UntypedStorage._cdata": "tells storages apart that have no memory, and so no address",
    "torch.nn.Module._modules": "a cached step compares it for every byte; named_children() builds a list each time",
    "torch.nn.Module._parameters": "likewise",
    "torch.nn.Module._buffers": "likewise",
    "torch.nn.Module._forward_hooks": "a cached step must not skip hooks; nothing public lists them",
    "torch.nn.Module._forward_hooks_with_kwargs": "likewise",
    "torch.nn.Module._forward_pre_hooks": "likewise",
    "torch.nn.Module._backward_hooks": "a fused map must not skip hooks; nothing public lists them",
    "torch.nn.Module._backward_pre_hooks": "likewise",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": (
        "DDP with NCCL reduces no sparse gradients; torch names no public way to leave parameters out"
    ),
    "torch.nn.Module._apply": "the count memory stays on the CPU and in its types; nothing public asks a module",
    # torch, in scripts that compare our scan to others
    "torch._higher_order_ops.associative_scan": "the operator under test has no public name yet",
    "torch._dynamo.config.recompile_limit": "each shape compiles anew; torch.compiler has no such setting",
    # executorch, in a benchmark
    "executorch.extension.pybindings.portable_lib._unsafe_reset_threadpool": "nothing public sets its threads",
    # datasets
    "datasets.IterableDataset._ex_iterable": "tells whether a stream is shuffled in a buffer; nothing public does",
    "datasets.Dataset._fingerprint": "tells whether a given dataset was packed already; nothing public does",
    # accelerate
    "accelerate.Accelerator._models": "tells whether training has prepared the model, as Trainer.evaluation_loop asks",
    # Models
    "transformers.PreTrainedModel._init_weights": _HOOK,
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": _HOOK,
    "transformers.PreTrainedModel._initialize_weights": "it skips units without vectors; nothing public runs for all",
    "transformers.PreTrainedModel._is_hf_initialized": "weights are initialised after they are sharded",
    "transformers.PreTrainedModel._no_split_modules": _HOOK,
    "transformers.PreTrainedModel._tied_weights_keys": _HOOK,
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": _HOOK,
    "transformers.PreTrainedModel._is_stateful": _HOOK,
    "transformers.PreTrainedModel._auto_class": "register_for_auto_class sets it, and nothing public reads it",
    "transformers.PreTrainedModel._gradient_checkpointing_func": "carries the user's gradient_checkpointing_kwargs",
    "transformers.PreTrainedModel._hf_peft_config_loaded": "get_adapter_state_dict() raises without an adapter",
    # Generation: a recurrent state is no KV cache, and generate() has no public extension point for another one.
    "transformers.GenerationMixin._supports_default_dynamic_cache": "no DynamicCache is made for a recurrent state",
    "transformers.GenerationMixin._update_model_kwargs_for_generation": "padding lies in the state: the mask ends",
    "transformers.GenerationMixin._expand_inputs_for_generation": "a given state is repeated for beams and samples",
    "transformers.GenerationMixin._sample": "the state after the last byte of each row is returned",
    "transformers.GenerationMixin._beam_search": "likewise",
    "transformers.GenerationMixin._get_logits_processor": "guidance gets a state in place of a cache",
    "transformers.GenerationMixin._reorder_cache": "beam search selects rows of the state",
    # Tokenizers
    "transformers.PythonBackend._encode_plus": "encodes through NumPy, 100 times faster than byte by byte",
    "transformers.PythonBackend._decode": "likewise",
    "transformers.PythonBackend._tokenize": _TOKENIZER,
    "transformers.PythonBackend._convert_token_to_id": _TOKENIZER,
    "transformers.PythonBackend._convert_id_to_token": _TOKENIZER,
    "transformers.PythonBackend._convert_token_to_id_with_added_voc": "ids of tokens and added tokens alike",
    "transformers.PythonBackend._added_tokens_encoder": "read for every text; the public property sorts a copy",
    "transformers.PythonBackend._added_tokens_decoder": "likewise",
    "transformers.PythonBackend._eventual_warn_about_too_long_sequence": "our _encode_plus keeps the usual warning",
    # Trainer
    "transformers.Trainer.set_initial_training_values": "undocumented; the data are endless, so steps are not epochs",
    "transformers.Trainer.floating_point_ops": "undocumented; recurrent models count their operations themselves",
    "transformers.Trainer.loss_is_scaled_for_ga": "undocumented; our loss is divided by the targets of all groups",
    "transformers.Trainer._tr_loss": "summed in float64, so that logs do not depend on the order of the processes",
    "transformers.Trainer._total_loss_scalar": "part of a run that is resumed bit for bit",
    "transformers.Trainer._globalstep_last_logged": "likewise",
    "transformers.Trainer._mixed_mesh_grads": "the guard clips sharded gradients, and leaves tables out",
    "transformers.Trainer._memory_tracker": "evaluate() reports memory as the overridden method does",
    "transformers.Trainer._get_output_dir": "the directory of a run, also in a hyperparameter search",
    "transformers.Trainer._save_checkpoint": _CHECKPOINT,
    "transformers.Trainer._save": _CHECKPOINT,
    "transformers.Trainer._load_from_checkpoint": "loads the weights of an adapter",
    "transformers.Trainer._load_callback_state": "restores the states of callbacks, where the arguments ask for it",
    "transformers.TrainingArguments._n_gpu": "nn.DataParallel would split the streams anew at every block",
}
