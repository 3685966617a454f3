"""BibTeX entries of the papers that a model's family, recurrent unit and training are from."""

from collections.abc import Iterable

# Key → type, and fields in their order. Papers on arXiv have their number there.
_PAPERS: dict[str, tuple[str, dict[str, str]]] = {
    "sequence_learning_from_continuous_streams": (
        "misc",
        {
            "title": "Sequence Learning from Continuous Streams of Data",
            "author": "Anonymous authors",
            "note": "Paper under double-blind review",
        },
    ),
    "de2024griffin": (
        "article",
        {
            "title": "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models",
            "author": "De, Soham and Smith, Samuel L. and others",
            "journal": "arXiv:2402.19427",
            "year": "2024",
        },
    ),
    "orvieto2023resurrecting": (
        "article",
        {
            "title": "Resurrecting Recurrent Neural Networks for Long Sequences",
            "author": "Orvieto, Antonio and Smith, Samuel L. and Gu, Albert and Fernando, Anushan and Gulcehre, "
            "Caglar and Pascanu, Razvan and De, Soham",
            "journal": "arXiv:2303.06349",
            "year": "2023",
        },
    ),
    "zucchet2023online": (
        "article",
        {
            "title": "Online learning of long-range dependencies",
            "author": "Zucchet, Nicolas and Meier, Robert and Schug, Simon and Mujika, Asier and Sacramento, "
            "Jo{\\~a}o",
            "journal": "arXiv:2305.15947",
            "year": "2023",
        },
    ),
    "menick2021practical": (
        "inproceedings",
        {
            "title": "A Practical Sparse Approximation for Real Time Recurrent Learning",
            "author": "Menick, Jacob and Elsen, Erich and Evci, Utku and Osindero, Simon and Simonyan, Karen and "
            "Graves, Alex",
            "booktitle": "International Conference on Learning Representations",
            "year": "2021",
        },
    ),
    "torchet2025mgrade": (
        "misc",
        {
            "title": "mGRADE: Minimal Recurrent Gating Meets Delay Convolutions for Lightweight Sequence Modeling",
            "author": "Torchet, Tristan and Metzner, Christian and Kriener, Laura and Payvand, Melika",
            "year": "2025",
        },
    ),
    "kumar2026pretraining": (
        "misc",
        {
            "title": "Pretraining Recurrent Networks without Recurrence",
            "author": "Kumar, Akarsh and Isola, Phillip",
            "year": "2026",
        },
    ),
    "feng2024rnns": (
        "article",
        {
            "title": "Were RNNs All We Needed?",
            "author": "Feng, Leo and others",
            "journal": "arXiv:2410.01201",
            "year": "2024",
        },
    ),
    "qin2023hierarchically": (
        "inproceedings",
        {
            "title": "Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
            "author": "Qin, Zhen and Yang, Songlin and Zhong, Yiran",
            "booktitle": "Advances in Neural Information Processing Systems",
            "year": "2023",
        },
    ),
    "bradbury2017quasi": (
        "inproceedings",
        {
            "title": "Quasi-Recurrent Neural Networks",
            "author": "Bradbury, James and Merity, Stephen and Xiong, Caiming and Socher, Richard",
            "booktitle": "International Conference on Learning Representations",
            "year": "2017",
        },
    ),
    "smith2023simplified": (
        "inproceedings",
        {
            "title": "Simplified State Space Layers for Sequence Modeling",
            "author": "Smith, Jimmy T.H. and Warrington, Andrew and Linderman, Scott W.",
            "booktitle": "International Conference on Learning Representations",
            "year": "2023",
        },
    ),
    "mehta2022long": (
        "article",
        {
            "title": "Long Range Language Modeling via Gated State Spaces",
            "author": "Mehta, Harsh and Gupta, Ankit and Cutkosky, Ashok and Neyshabur, Behnam",
            "journal": "arXiv:2206.13947",
            "year": "2022",
        },
    ),
    "fu2023hungry": (
        "inproceedings",
        {
            "title": "Hungry Hungry Hippos: Towards Language Modeling with State Space Models",
            "author": "Fu, Daniel Y. and Dao, Tri and Saab, Khaled K. and Thomas, Armin W. and Rudra, Atri and "
            "R{\\'e}, Christopher",
            "booktitle": "International Conference on Learning Representations",
            "year": "2023",
        },
    ),
    "lei2018simple": (
        "inproceedings",
        {
            "title": "Simple Recurrent Units for Highly Parallelizable Recurrence",
            "author": "Lei, Tao and Zhang, Yu and Wang, Sida I. and Dai, Hui and Artzi, Yoav",
            "booktitle": "Conference on Empirical Methods in Natural Language Processing",
            "year": "2018",
        },
    ),
    "irie2024exploring": (
        "inproceedings",
        {
            "title": "Exploring the Promise and Limits of Real-Time Recurrent Learning",
            "author": 'Irie, Kazuki and Gopalakrishnan, Anand and Schmidhuber, J{\\"u}rgen',
            "booktitle": "International Conference on Learning Representations",
            "year": "2024",
        },
    ),
    "katsch2023gateloop": (
        "article",
        {
            "title": "GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling",
            "author": "Katsch, Tobias",
            "journal": "arXiv:2311.01927",
            "year": "2023",
        },
    ),
    "li2018independently": (
        "inproceedings",
        {
            "title": "Independently Recurrent Neural Network (IndRNN): Building A Longer and Deeper RNN",
            "author": "Li, Shuai and Li, Wanqing and Cook, Chris and Zhu, Ce and Gao, Yanbo",
            "booktitle": "Proceedings of the IEEE Conference on Computer Vision and Pattern Recognition",
            "year": "2018",
        },
    ),
    "cho2014learning": (
        "inproceedings",
        {
            "title": "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation",
            "author": "Cho, Kyunghyun and others",
            "booktitle": "Proceedings of the Conference on Empirical Methods in Natural Language Processing",
            "year": "2014",
        },
    ),
    "touvron2023llama": (
        "article",
        {
            "title": "Llama 2: Open Foundation and Fine-Tuned Chat Models",
            "author": "Touvron, Hugo and others",
            "journal": "arXiv:2307.09288",
            "year": "2023",
        },
    ),
    "gu2023mamba": (
        "article",
        {
            "title": "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
            "author": "Gu, Albert and Dao, Tri",
            "journal": "arXiv:2312.00752",
            "year": "2023",
        },
    ),
    "dao2024transformers": (
        "article",
        {
            "title": "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State "
            "Space Duality",
            "author": "Dao, Tri and Gu, Albert",
            "journal": "arXiv:2405.21060",
            "year": "2024",
        },
    ),
    "zuo2024falcon": (
        "article",
        {
            "title": "Falcon Mamba: The First Competitive Attention-free 7B Language Model",
            "author": "Zuo, Jingwei and others",
            "journal": "arXiv:2410.05355",
            "year": "2024",
        },
    ),
    "botev2024recurrentgemma": (
        "article",
        {
            "title": "RecurrentGemma: Moving Past Transformers for Efficient Open Language Models",
            "author": "Botev, Aleksandar and others",
            "journal": "arXiv:2404.07839",
            "year": "2024",
        },
    ),
    "beck2024xlstm": (
        "article",
        {
            "title": "xLSTM: Extended Long Short-Term Memory",
            "author": "Beck, Maximilian and others",
            "journal": "arXiv:2405.04517",
            "year": "2024",
        },
    ),
    "hu2021lora": (
        "article",
        {
            "title": "LoRA: Low-Rank Adaptation of Large Language Models",
            "author": "Hu, Edward J. and others",
            "journal": "arXiv:2106.09685",
            "year": "2021",
        },
    ),
}
_STREAMS, _LRU, _ONLINE = "sequence_learning_from_continuous_streams", "orvieto2023resurrecting", "zucchet2023online"
_OF_FAMILIES = {
    "memora": [_STREAMS],
    "hawk": ["de2024griffin"],
    "lru": [_LRU, _ONLINE],
    "mgrade": ["torchet2025mgrade"],
    "smt_rnn": ["kumar2026pretraining"],
    "smt_teacher": ["kumar2026pretraining"],
    "llama": ["touvron2023llama"],
    "mamba": ["gu2023mamba"],
    "mamba2": ["dao2024transformers"],
    "falcon_mamba": ["zuo2024falcon"],
    "recurrent_gemma": ["botev2024recurrentgemma"],
    "xlstm": ["beck2024xlstm"],
}
_OF_UNITS = {
    "glru": [_STREAMS],
    "complex_glru": [_STREAMS],
    "complex_glru_conjugate": [_STREAMS],
    "complex_glru_read_out": [_STREAMS],
    "complex_glru_conjugate_read_out": [_STREAMS],
    "rg_lru": ["de2024griffin"],
    "real_lru": [_LRU],
    "complex_lru": [_LRU],
    "complex_lru_conjugate": [_LRU],
    "lru": [_LRU],
    "mingru": ["feng2024rnns"],
    "hgrn": ["qin2023hierarchically"],
    "qrnn": ["bradbury2017quasi"],
    "s5": ["smith2023simplified"],
    "gss": ["mehta2022long"],
    "h3": ["fu2023hungry"],
    "indrnn": ["li2018independently"],
    "minlstm": ["feng2024rnns"],
    "gateloop": ["katsch2023gateloop"],
    "sru": ["lei2018simple"],
    "elstm": ["irie2024exploring"],
    "slstm": ["beck2024xlstm"],
    "gru": ["cho2014learning"],
    "dense_linear": [_ONLINE],
}
_OF_METHODS = {
    "multi_stream": [_STREAMS],
    "rtrl": [_STREAMS, _ONLINE],
    "snap1": ["menick2021practical"],
    "truncated": [_ONLINE],
    "spatial": [_ONLINE],
    "smt": ["kumar2026pretraining"],
    "dmt": ["kumar2026pretraining"],
    "LORA": ["hu2021lora"],
}


def citations(model_type: str, unit: str | None, methods: Iterable[str]) -> str:
    """BibTeX of the papers of a model, that of its family first; empty for a family that is not known.

    Args:
        model_type: of the configuration.
        unit: name of the recurrent unit, if it can be chosen.
        methods: methods of training; "multi_stream" for training on continuous streams, "LORA" for such adapters.
    """
    keys = [*_OF_FAMILIES.get(model_type, ()), *_OF_UNITS.get(unit or "", ())]
    keys += [key for method in methods for key in _OF_METHODS.get(method, ())]
    return "\n\n".join(_entry(key) for key in dict.fromkeys(keys))


def _entry(key: str) -> str:
    kind, fields = _PAPERS[key]
    lines = ",\n".join(f"  {name:<9} = {{{value}}}" for name, value in fields.items())
    return f"@{kind}{{{key},\n{lines}\n}}"
