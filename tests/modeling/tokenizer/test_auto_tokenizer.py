"""Saved tokenizers load by `AutoTokenizer`, with the package and without it."""

import json
import textwrap
from pathlib import Path

from test_tokenization_common import TEXTS

from hf_recurrent.modeling.tokenizer.tokenization_byte import ByteTokenizer

ROOT = Path(__file__).resolve().parents[3]


def test_auto_tokenizer_without_the_package(tmp_path, bare_python):
    for cls, texts in TEXTS.items():
        cls().save_pretrained(tmp_path / cls.__name__)
        config = json.loads((tmp_path / cls.__name__ / "tokenizer_config.json").read_text())
        assert config["auto_map"]["AutoTokenizer"][0] == f"{cls.__module__.rsplit('.', 1)[1]}.{cls.__name__}"
        (tmp_path / cls.__name__ / "expected.json").write_text(json.dumps([texts, cls()(texts, padding=True).data]))
    code = """
        import json, sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "hf_recurrent":
                    raise ImportError("hf_recurrent is not installed here")

        sys.meta_path.insert(0, Absent())
        from transformers import AutoTokenizer

        for name in sys.argv[1:]:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
            assert type(tokenizer).__name__ == name, type(tokenizer)
            assert type(tokenizer).__module__.startswith("transformers_modules."), type(tokenizer)
            texts, expected = json.load(open(f"{name}/expected.json"))
            assert tokenizer(texts, padding=True).data == expected
            assert tokenizer.decode(tokenizer.encode_bytes(b"\\x00")) == "\\x00"
            # and from there to yet another place
            tokenizer.save_pretrained(f"again/{name}")
            again = AutoTokenizer.from_pretrained(f"again/{name}", trust_remote_code=True)
            assert type(again).__name__ == name and again(texts, padding=True).data == expected
        bad = bytes(range(256))
        tokenizer = AutoTokenizer.from_pretrained("ByteTokenizer", trust_remote_code=True)
        assert tokenizer.decode_bytes(list(bad)) == bad
        assert tokenizer.decode(list(bad)) == bad.decode("utf-8", "replace")
        assert tokenizer.encode(tokenizer.decode(list(bad), errors="surrogateescape")) == list(bad)
        assert "hf_recurrent" not in sys.modules
        print("done")
    """
    done = bare_python.python(["-c", textwrap.dedent(code), *(cls.__name__ for cls in TEXTS)], tmp_path)
    assert "done" in done.stdout, done.stderr


def test_auto_tokenizer_with_the_package(tmp_path, bare_python):
    ByteTokenizer().save_pretrained(tmp_path / "ByteTokenizer")
    code = """
        import hf_recurrent
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained("ByteTokenizer")
        assert type(tokenizer) is hf_recurrent.ByteTokenizer, type(tokenizer)
        assert tokenizer.encode(bytes(range(256))) == list(range(256))
        print("done")
    """
    done = bare_python.python(["-c", textwrap.dedent(code)], tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert "done" in done.stdout, done.stderr
