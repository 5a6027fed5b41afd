"""The README's Python runs as it stands."""

import re
from pathlib import Path

from bdcore.models.drafter import Drafter, save_drafter
from tests.conftest import tiny_llama


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def test_the_library_example_decodes_a_batch_greedily_and_sampled(tmp_path, capsys, prompt):
    (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    tiny_llama().save_pretrained(tmp_path / "verifier")
    save_drafter(Drafter(tiny_llama(), None), tmp_path / "drafter", tokenizer=NoTokenizer(), facts={})
    given = {
        "verifier_folder": str(tmp_path / "verifier"),
        "drafter_folder": str(tmp_path / "drafter"),
        "prompts": [prompt(5), prompt(300)],
    }
    exec(code, given)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.split()[1] in ("length", "eos") for line in lines)
