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
    "hf_recurrent.modeling.memora.configuration_memora": ("MemoraConfig",),
    "hf_recurrent.modeling.hawk.configuration_hawk": ("HawkConfig",),
    "hf_recurrent.modeling.mgrade.configuration_mgrade": ("MgradeConfig",),
    "hf_recurrent.modeling.lru.configuration_lru": ("LruConfig",),
    "hf_recurrent.modeling.smt.configuration_smt_rnn": ("SmtRnnConfig",),
    "hf_recurrent.modeling.smt.configuration_smt_teacher": ("SmtTeacherConfig",),
    "hf_recurrent.modeling.memora.modeling_memora": (
        "MemoraForCausalLM",
        "MemoraForSequenceClassification",
        "MemoraModel",
    ),
    "hf_recurrent.modeling.lru.modeling_lru": ("LruForCausalLM", "LruForSequenceClassification", "LruModel"),
    "hf_recurrent.modeling.hawk.modeling_hawk": ("HawkForCausalLM", "HawkForSequenceClassification", "HawkModel"),
    "hf_recurrent.modeling.mgrade.modeling_mgrade": (
        "MemoryFootprint",
        "MgradeForCausalLM",
        "MgradeForSequenceClassification",
        "MgradeModel",
    ),
    "hf_recurrent.modeling.smt.modeling_smt_rnn": (
        "SmtRnnForCausalLM",
        "SmtRnnForSequenceClassification",
        "SmtRnnModel",
        "teacher_fields",
    ),
    "hf_recurrent.modeling.smt.modeling_smt_teacher": ("SmtTeacherModel", "SmtTeacherOutput"),
    "hf_recurrent.modeling.block.recurrent_sequence_classification": ("RecurrentSequenceClassifierOutput",),
    "hf_recurrent.modeling.contexts.ngram_embedding": ("table_parameters",),
    "hf_recurrent.modeling.block.recurrent_causal_lm": ("RecurrentCausalLMOutput",),
    "hf_recurrent.modeling.block.recurrent_generation": ("RecurrentGenerateBeamOutput", "RecurrentGenerateOutput"),
    "hf_recurrent.modeling.block.recurrent_state": (
        "RecurrentState",
        "join_states",
        "select_state",
        "split_state",
        "state_size",
    ),
    "hf_recurrent.checkpoints.state_files": ("load_state", "save_state"),
    "hf_recurrent.checkpoints.weight_hashing": ("weights_hash",),
    "hf_recurrent.modeling.tokenizer.byte_streamer": ("ByteIteratorStreamer", "ByteStreamer"),
    "hf_recurrent.modeling.tokenizer.tokenization_byte": ("AlphabetTokenizer", "ByteTokenizer"),
    "hf_recurrent.modeling.tokenizer.chat_template": ("CHAT_TEMPLATE",),
    "hf_recurrent.modeling.tokenizer.tokenization_dna": ("DNATokenizer",),
    "hf_recurrent.modeling.scan.linear_scan": ("linear_scan",),
    "hf_recurrent.modeling.units.recurrent_unit": ("RecurrentUnit",),
    "hf_recurrent.modeling.units.nonlinear_units": ("SequentialUnit",),
    "hf_recurrent.modeling.units.dense_units": ("DenseUnit",),
    "hf_recurrent.modeling.units.recurrent_units": ("register_recurrent_unit",),
    "hf_recurrent.stock_models.with_state": ("with_state",),
    "hf_recurrent.server.client": ("RemoteSession", "ServerError", "SessionClient"),
    "hf_recurrent.export.programs": ("export_block", "export_step"),
    "hf_recurrent.export.exported_step": ("ExportedStep", "save_exported_step"),
    "hf_recurrent.export.exported_learner": ("save_c_learner",),
    "hf_recurrent.export.c_learner_state": ("load_c_state", "save_c_state"),
    "hf_recurrent.presets": ("config_from_preset", "preset_names"),
    "hf_recurrent.data.corpus": ("Corpus",),
    "hf_recurrent.data.episode_source": ("EpisodeSource", "EvaluationShare"),
    "hf_recurrent.data.mixture": ("Mixture",),
    "hf_recurrent.data.loading": ("load_corpus", "load_splits", "stream_documents"),
    "hf_recurrent.data.sources": ("register_source",),
    "hf_recurrent.data.pixel_readers": ("save_image_sheet", "tokens_to_images"),
    "hf_recurrent.data.streamed_documents": ("StreamedDocuments",),
    "hf_recurrent.data.block_dataset": ("Block", "BlockDataset"),
    "hf_recurrent.data.streams": ("EvaluationStreams", "IIDDataset", "MultiStreamDataset"),
    "hf_recurrent.data.document_order": ("hash_integers",),
    "hf_recurrent.trainers.multi_stream_arguments": ("MultiStreamTrainingArguments", "RollingWindowTrainingArguments"),
    "hf_recurrent.trainers.stream_trainer": ("StreamTrainer",),
    "hf_recurrent.trainers.methods.training_method": ("TrainingMethod",),
    "hf_recurrent.trainers.methods.truncated_bptt": ("TruncatedBptt",),
    "hf_recurrent.trainers.methods.memory_methods": ("DmtMethod", "SmtMethod"),
    "hf_recurrent.trainers.public_trainers": (
        "DmtTrainer",
        "MultiStreamTrainer",
        "OnlineTrainer",
        "RollingWindowTrainer",
        "SmtTrainer",
    ),
    "hf_recurrent.trainers.online_arguments": ("OnlineTrainingArguments",),
    "hf_recurrent.trainers.smt_arguments": ("DmtTrainingArguments", "SmtTrainingArguments"),
    "hf_recurrent.trainers.smt.smt_objective": ("DmtObjective", "SmtObjective", "uniformity_loss"),
    "hf_recurrent.trainers.smt.metrics": ("measure_memories",),
    "hf_recurrent.learning_rules.optimizers": ("apply_learning_rate_factors",),
    "hf_recurrent.learning_rules.sensitivities": ("SensitivityEngine",),
    "hf_recurrent.learning_rules.sequence_rules": ("SequenceRule",),
    "hf_recurrent.compression.files": ("compress", "compress_file", "decompress", "decompress_file"),
    "hf_recurrent.compression.adaptive_predictor": ("AdaptiveSettings",),
    "hf_recurrent.online.learner": ("OnlineLearner",),
    "hf_recurrent.online.vector_learner": ("VectorLearner",),
    "hf_recurrent.online.prequential": ("PrequentialRecord", "plot_records", "read_records"),
    "hf_recurrent.online.sources": ("open_source",),
    "hf_recurrent.learning_rules.alignment": ("GradientAlignment", "gradient_alignment"),
    "hf_recurrent.generation.constraints": ("Constraint", "JsonSchemaConstraint", "RegexConstraint"),
    "hf_recurrent.generation.continuations": ("Continuation", "sample_continuations"),
    "hf_recurrent.generation.speculative": ("SpeculativeOutput", "generate_speculative"),
    "hf_recurrent.evaluation.bits_per_byte": ("evaluate_bits_per_byte",),
    "hf_recurrent.evaluation.samples": ("sample_images",),
    "hf_recurrent.tasks.task": ("Task", "TaskStreams", "evaluate_task"),
    "hf_recurrent.tasks.task_names": ("register_task", "task_from_name", "task_names"),
    "hf_recurrent.tasks.example_draws": ("ExampleDraws",),
    "hf_recurrent.tasks.recall": (
        "AssociativeRecall",
        "Copying",
        "InductionHeads",
        "SelectiveCopying",
        "SentinelCopy",
    ),
    "hf_recurrent.tasks.state_tracking": ("FlipFlop", "Parity", "PermutationComposition"),
    "hf_recurrent.tasks.smt_tasks": ("KeysValues", "ModularArithmetic", "Retrieval", "StackOperations", "StringCopy"),
    "hf_recurrent.tasks.classification": (
        "ByteTexts",
        "ListOps",
        "PixelSequences",
        "byte_text_classification",
        "collate_sequences",
        "sequential_cifar10",
        "sequential_mnist",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}

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
