"""Recurrent byte-level language models for the Hugging Face ecosystem, trained on continuous streams.

Every public name can be imported from here. Its module is loaded when the name is first used.
"""

import importlib
import os

from hf_recurrent.auto_registration import register

# In a clone without symbolic links, `modeling` and `trainers` here are text files: the folders lie one level up.
if os.path.isfile(os.path.join(__path__[0], "modeling")):
    __path__.append(os.path.dirname(__path__[0]))

__version__ = "0.1.0"

# Module → its public names.
_PUBLIC_NAMES = {
    "modeling.memora.configuration_memora": ("MemoraConfig",),
    "modeling.hawk.configuration_hawk": ("HawkConfig",),
    "modeling.mgrade.configuration_mgrade": ("MgradeConfig",),
    "modeling.lru.configuration_lru": ("LruConfig",),
    "modeling.smt.configuration_smt_rnn": ("SmtRnnConfig",),
    "modeling.smt.configuration_smt_teacher": ("SmtTeacherConfig",),
    "modeling.memora.modeling_memora": ("MemoraForCausalLM", "MemoraForSequenceClassification", "MemoraModel"),
    "modeling.lru.modeling_lru": ("LruForCausalLM", "LruForSequenceClassification", "LruModel"),
    "modeling.hawk.modeling_hawk": ("HawkForCausalLM", "HawkForSequenceClassification", "HawkModel"),
    "modeling.mgrade.modeling_mgrade": (
        "MemoryFootprint",
        "MgradeForCausalLM",
        "MgradeForSequenceClassification",
        "MgradeModel",
    ),
    "modeling.smt.modeling_smt_rnn": (
        "SmtRnnForCausalLM",
        "SmtRnnForSequenceClassification",
        "SmtRnnModel",
        "teacher_fields",
    ),
    "modeling.smt.modeling_smt_teacher": ("SmtTeacherModel", "SmtTeacherOutput"),
    "modeling.block.recurrent_sequence_classification": ("RecurrentSequenceClassifierOutput",),
    "modeling.contexts.ngram_embedding": ("table_parameters",),
    "modeling.block.recurrent_causal_lm": ("RecurrentCausalLMOutput",),
    "modeling.block.recurrent_generation": ("RecurrentGenerateBeamOutput", "RecurrentGenerateOutput"),
    "modeling.block.recurrent_state": ("RecurrentState", "join_states", "select_state", "split_state", "state_size"),
    "checkpoints.state_files": ("load_state", "save_state"),
    "checkpoints.weight_hashing": ("weights_hash",),
    "modeling.tokenizer.byte_streamer": ("ByteIteratorStreamer", "ByteStreamer"),
    "modeling.tokenizer.tokenization_byte": ("AlphabetTokenizer", "ByteTokenizer"),
    "modeling.tokenizer.chat_template": ("CHAT_TEMPLATE",),
    "modeling.tokenizer.tokenization_dna": ("DNATokenizer",),
    "modeling.scan.linear_scan": ("linear_scan",),
    "modeling.units.recurrent_unit": ("RecurrentUnit",),
    "modeling.units.nonlinear_units": ("SequentialUnit",),
    "modeling.units.dense_units": ("DenseUnit",),
    "modeling.units.recurrent_units": ("register_recurrent_unit",),
    "stock_models.with_state": ("with_state",),
    "server.client": ("RemoteSession", "ServerError", "SessionClient"),
    "export.programs": ("export_block", "export_step"),
    "export.exported_step": ("ExportedStep", "save_exported_step"),
    "export.exported_learner": ("save_c_learner",),
    "export.c_learner_state": ("load_c_state", "save_c_state"),
    "presets": ("config_from_preset", "preset_names"),
    "data.corpus": ("Corpus",),
    "data.episode_source": ("EpisodeSource", "EvaluationShare"),
    "data.mixture": ("Mixture",),
    "data.loading": ("load_corpus", "load_splits", "stream_documents"),
    "data.sources": ("register_source",),
    "data.pixel_readers": ("save_image_sheet", "tokens_to_images"),
    "data.streamed_documents": ("StreamedDocuments",),
    "data.block_dataset": ("Block", "BlockDataset"),
    "data.streams": ("EvaluationStreams", "IIDDataset", "MultiStreamDataset"),
    "data.document_order": ("hash_integers",),
    "trainers.multi_stream_arguments": ("MultiStreamTrainingArguments", "RollingWindowTrainingArguments"),
    "trainers.stream_trainer": ("StreamTrainer",),
    "trainers.methods.training_method": ("TrainingMethod",),
    "trainers.methods.truncated_bptt": ("TruncatedBptt",),
    "trainers.methods.memory_methods": ("DmtMethod", "SmtMethod"),
    "trainers.public_trainers": (
        "DmtTrainer",
        "MultiStreamTrainer",
        "OnlineTrainer",
        "RollingWindowTrainer",
        "SmtTrainer",
    ),
    "trainers.online_arguments": ("OnlineTrainingArguments",),
    "trainers.smt_arguments": ("DmtTrainingArguments", "SmtTrainingArguments"),
    "trainers.smt.smt_objective": ("DmtObjective", "SmtObjective", "uniformity_loss"),
    "trainers.smt.metrics": ("measure_memories",),
    "learning_rules.optimizers": ("apply_learning_rate_factors",),
    "learning_rules.sensitivities": ("SensitivityEngine",),
    "learning_rules.sequence_rules": ("SequenceRule",),
    "compression.files": ("compress", "compress_file", "decompress", "decompress_file"),
    "compression.adaptive_predictor": ("AdaptiveSettings",),
    "online.learner": ("OnlineLearner",),
    "online.vector_learner": ("VectorLearner",),
    "online.prequential": ("PrequentialRecord", "plot_records", "read_records"),
    "online.sources": ("open_source",),
    "learning_rules.alignment": ("GradientAlignment", "gradient_alignment"),
    "generation.constraints": ("Constraint", "JsonSchemaConstraint", "RegexConstraint"),
    "generation.continuations": ("Continuation", "sample_continuations"),
    "generation.speculative": ("SpeculativeOutput", "generate_speculative"),
    "evaluation.bits_per_byte": ("evaluate_bits_per_byte",),
    "evaluation.samples": ("sample_images",),
    "tasks.task": ("Task", "TaskStreams", "evaluate_task"),
    "tasks.task_names": ("register_task", "task_from_name", "task_names"),
    "tasks.example_draws": ("ExampleDraws",),
    "tasks.recall": ("AssociativeRecall", "Copying", "InductionHeads", "SelectiveCopying", "SentinelCopy"),
    "tasks.state_tracking": ("FlipFlop", "Parity", "PermutationComposition"),
    "tasks.smt_tasks": ("KeysValues", "ModularArithmetic", "Retrieval", "StackOperations", "StringCopy"),
    "tasks.classification": (
        "ByteTexts",
        "ListOps",
        "PixelSequences",
        "byte_text_classification",
        "collate_sequences",
        "sequential_cifar10",
        "sequential_mnist",
    ),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _PUBLIC_NAMES.items() for name in names}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
