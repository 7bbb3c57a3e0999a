"""The command: what it prepares, what it says is there, and what it refuses."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from jaxscale import config, prepare
from jaxscale.config.data_source import Source
from jaxscale.data.inspect import histogram
from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Two hundred records, and a text of paragraphs."""
    folder = tmp_path_factory.mktemp("texts")
    words = [f"the {i}th cat sat on mat {i * i} with a hat" for i in range(200)]
    lines = [
        json.dumps({"body": f"{word} and again {word}" * (i % 7 + 1)})
        for i, word in enumerate(words)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("\n\n".join(words))
    return folder


@pytest.fixture(scope="session")
def prepared(texts, tmp_path_factory):
    """What the command made of the records, and the JSON it wrote."""
    folder = tmp_path_factory.mktemp("prepared")
    result = folder / "result.json"
    status = prepare.main(
        [
            "--input",
            f"{texts}/a.jsonl",
            "--field",
            "body",
            "--tokenizer",
            "bpe:300",
            "--output",
            str(folder / "out"),
            "--workers",
            "2",
            "--shard_bytes",
            "20000",
            "--json",
            str(result),
        ]
    )
    assert status == 0
    return folder / "out", json.loads(result.read_text())


def refused(capsys, *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        prepare.main(list(flags))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_preparing_counts_what_it_made(prepared, texts):
    folder, result = prepared
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    corpus = open_corpus([str(folder)], tokenizer)
    bodies = [json.loads(line)["body"] for line in (texts / "a.jsonl").read_text().splitlines()]
    assert result["num_documents"] == corpus.num_documents == len(bodies) == 200
    assert result["num_bytes"] == sum(len(body.encode()) for body in bodies)
    assert result["num_tokens"] == corpus.num_tokens
    assert result["num_shards"] == len(corpus.shards) > 1
    assert (result["tokenizer"], result["vocab_size"]) == ("bpe:300", 300)
    assert tokenizer.decode(corpus.tokens[1 : corpus.offsets[1]]) == bodies[0]
    assert corpus.token_bytes[corpus.tokens].sum() == corpus.num_bytes


def test_preparing_again_is_immediate_and_other_text_is_refused(prepared, texts, capsys):
    folder, _ = prepared
    flags = ["--field", "body", "--output", str(folder), "--shard_bytes", "20000"]
    again = [*flags, "--input", f"{texts}/a.jsonl", "--tokenizer", "bpe:300"]
    before = os.stat(folder / "index.json").st_mtime_ns
    assert prepare.main(again) == 0
    assert os.stat(folder / "index.json").st_mtime_ns == before
    assert "--config.data.source=" in capsys.readouterr().out
    message = refused(capsys, *again, "--max_document_bytes", "50")
    assert "has shards of other text, or by another tokenizer or other settings" in message
    for other in (["--tokenizer", "bpe:310"], ["--tokenizer", "bpe:300", "--seed", "1"]):
        message = refused(capsys, *flags, "--input", f"{texts}/a.jsonl", *other)
        assert "has shards of other text, or by another tokenizer or other settings" in message


def test_a_refused_command_leaves_no_tokenizer_to_the_next(texts, tmp_path, capsys):
    """Neither in its own folder, once its text is mended, nor in one of finished shards."""
    flags = ["--output", str(tmp_path / "o"), "--workers", "0", "--tokenizer"]
    (tmp_path / "m.jsonl").write_text('{"text": "%s"}\nno JSON\n' % ("wrong words of it, " * 9))
    refused(capsys, "--input", str(tmp_path / "m.jsonl"), *flags, "bpe:260")
    (tmp_path / "m.jsonl").write_text('{"text": "%s"}\n' % ("the right text instead " * 9))
    assert prepare.main(["--input", str(tmp_path / "m.jsonl"), *flags, "bpe:260"]) == 0
    trained = load_tokenizer("bpe:260", [str(tmp_path / "m.jsonl")])
    assert (tmp_path / "o" / "tokenizer.json").read_bytes() == trained.file
    finished = [*flags[:1], str(tmp_path / "b"), *flags[2:]]
    assert prepare.main(["--input", f"{texts}/b.txt", *finished, "bytes"]) == 0
    there = sorted((tmp_path / "b").iterdir())
    assert "by another tokenizer" in refused(
        capsys, "--input", f"{texts}/b.txt", *finished, "bpe:260"
    )
    assert sorted((tmp_path / "b").iterdir()) == there


def test_inspecting_shards_says_what_is_there(prepared, tmp_path, capsys):
    folder, result = prepared
    flags = ["--json", str(tmp_path / "i.json"), "--png", str(tmp_path / "i.png")]
    assert prepare.main(["--inspect", str(folder), *flags]) == 0
    said = capsys.readouterr().out
    for part in (
        "documents    200",
        f"{result['num_tokens']:,} (",
        "bpe:300: 300 ids",
        "<|endoftext|> = 0",
        "sentinels    none",
        result["fingerprint"],
        "segment 1:",
        "<|endoftext|>the ",
        "th cat sat on mat",
    ):
        assert part in said
    (source,) = json.loads((tmp_path / "i.json").read_text())["sources"]
    assert source["num_documents"] == 200
    assert source["complete"]
    assert sum(one["documents"] for one in source["length_histogram"]) == 200
    tokens = sum(one["tokens"] for one in source["length_histogram"])
    assert tokens == result["num_tokens"] - 200  # a boundary each
    assert (tmp_path / "i.png").read_bytes()[:4] == b"\x89PNG"


def test_examples_are_shown_by_segment(texts, tmp_path):
    out = tmp_path / "i.json"
    prepare.main(
        [
            "--inspect",
            f"{texts}/b.txt",
            "--boundary",
            "paragraph",
            "--examples",
            "2",
            "--json",
            str(out),
        ]
    )
    result = json.loads(out.read_text())
    assert result["sources"][0]["num_documents"] == 200
    assert len(result["examples"]) == 2
    for parts in result["examples"]:
        assert [part["segment"] for part in parts] == list(range(1, len(parts) + 1))
        assert sum(part["tokens"] for part in parts) == 256
        for part in parts[1:-1]:
            assert part["first_position"] == 0
            assert part["text"].startswith("<|endoftext|>the ")
            assert part["text"].endswith("with a hat")


def test_inspecting_a_configuration_shows_the_mixture(prepared, texts, tmp_path, capsys):
    path = tmp_path / "c.py"
    source = [
        {"path": str(prepared[0]), "weight": 3},
        {"path": f"{texts}/b.txt", "boundary": "line", "weight": 1},
    ]
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict({{'data': {{'source': {source}, 'seq_len': 64,\n"
        f"    'tokenizer': 'bpe:300'}}, 'model': {{'vocab_size': 300}}, 'run': {{'steps': 50}}}})\n"
    )
    assert config.load(str(path)).data.source[1].weight == 1
    assert prepare.main(["--inspect", "--config", str(path), "--json", str(tmp_path / "j")]) == 0
    said = capsys.readouterr().out
    assert "what a run of 50 steps reads" in said
    assert "300 examples, 75.0 % of all" in said
    result = json.loads((tmp_path / "j").read_text())
    assert [one["examples"] for one in result["mixture"]] == [300, 100]
    assert len(result["sources"]) == 2
    fewer = ["--inspect", "--config", str(path), "--config.run.steps=10"]
    assert prepare.main(fewer) == 0
    assert "60 examples, 75.0 %" in capsys.readouterr().out


def test_a_large_source_is_sampled(texts, monkeypatch, capsys):
    monkeypatch.setattr("jaxscale.data.inspect.SAMPLE_BYTES", 1000)
    assert prepare.main(["--inspect", f"{texts}/b.txt", "--boundary", "paragraph"]) == 0
    said = capsys.readouterr().out
    assert "of which a sample is counted here" in said
    assert "segment 2:" in said


def test_lengths_are_counted_between_powers_of_two():
    import numpy as np  # noqa: PLC0415

    lengths = np.array([0, 1, 2, 3, 4, 7, 8, 100])
    assert histogram(lengths)[:5] == [
        (0, 0, 1, 0),
        (1, 1, 1, 1),
        (2, 3, 2, 5),
        (4, 7, 2, 11),
        (8, 15, 1, 8),
    ]
    assert histogram(lengths)[-1] == (64, 127, 1, 100)
    assert sum(count for _, _, count, _ in histogram(lengths)) == len(lengths)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--input is missing; give --input PATH ..."),
        ("--input a.txt", "--output is missing"),
        ("--input a.txt --output b", "--tokenizer is missing"),
        ("--inpt a.txt", "unknown flag --inpt; did you mean --input?"),
        ("--input no/*.txt --tokenizer bytes --output OUT", "'no/*.txt' matches no file"),
        ("--input a.txt --tokenizer byte --output OUT", "data.tokenizer = 'byte' is neither"),
        (
            "--input a.txt --tokenizer bytes --output s3://b/c",
            "s3://b/c is a URL; give a local folder",
        ),
        ("--input a.txt --tokenizer bytes --output OUT --workers -1", "-1 is not from 0 to"),
        ("--input a.txt --tokenizer bytes --output OUT --format jsnl", "invalid choice: 'jsnl'"),
        ("--input a.txt --tokenizer bytes --output OUT --skip_share 2", "--skip_share: 2 is not"),
        ("--input PREPARED --tokenizer bytes --output OUT", "is a folder of shards; give text"),
        ("--input a.txt --tokenizer bytes --output OUT --config x.py", "--config is for --inspect"),
        (
            "--input a.txt --tokenizer bytes --output a.txt",
            "--output a.txt is a file; give the name",
        ),
        ("--input a.txt --tokenizer bytes --output OUT --png p", "--png is for --inspect; leave"),
        (
            "--input a.txt --tokenizer bytes --output OUT --examples=3",
            "--examples is for --inspect",
        ),
        (
            "--input a.txt --tokenizer bytes --output OUT --seed=1",
            "--seed is for --tokenizer bpe:N; leave it out with bytes",
        ),
        ("--inspect a.txt --workers 2", "--workers is for preparing; leave it out of --inspect"),
        ("--inspect --config c.py --skip_share=0.1", "--skip_share is for --inspect PATH; with"),
        ("--inspect --config c.py --tokenizer bytes", "with --config, set it in data"),
        ("--inspect", "--inspect needs either PATH ... or --config FILE"),
        ("--inspect a.txt --config b.py", "--inspect needs either PATH"),
        ("--inspect a.txt --output b", "--inspect only reads; leave --input and --output out"),
        ("--inspect no/such", "'no/such' matches no file"),
        ("--inspect PREPARED --tokenizer bytes", "'bytes' is not the tokenizer of"),
        ("--inspect --config no.py", "--config no.py: there is no such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(prepared, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    words = flags.replace("OUT", str(tmp_path / "out")).replace("PREPARED", str(prepared[0]))
    assert message in refused(capsys, *words.split())


WITHOUT_PRIVILEGES = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
"""Before a command: it is refused what root, who may run the tests, would not be."""


@pytest.mark.proof
@pytest.mark.skipif(not shutil.which("setpriv"), reason="setpriv takes away root's privileges")
@pytest.mark.parametrize(
    ("mode", "path", "named"), [(0, "*.txt", "no"), (0, "a.txt", "no"), (0o444, "", "no/a.txt")]
)
def test_a_folder_that_may_not_be_read_is_named(tmp_path, mode, path, named):
    folder = tmp_path / "no"
    folder.mkdir()
    (folder / "a.txt").touch()
    folder.chmod(mode)
    words = ["--input", str(folder / path), "--tokenizer", "bytes", "--output", str(tmp_path / "o")]
    command = [sys.executable, "-m", "jaxscale.prepare", *words]
    command = command if os.geteuid() else [*WITHOUT_PRIVILEGES, *command]
    done = subprocess.run(command, capture_output=True, text=True)
    folder.chmod(0o777)
    assert done.stderr == f"error: {tmp_path / named} cannot be read: Permission denied\n"
    assert done.returncode == 2


@pytest.mark.proof
def test_a_bad_record_is_named_and_a_worker_says_it_too(texts, tmp_path, capsys):
    lines = (texts / "a.jsonl").read_text().splitlines()
    lines[150] = lines[150][:20]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    flags = [
        "--input",
        f"{tmp_path}/a.jsonl",
        "--field",
        "body",
        "--tokenizer",
        "bytes",
        "--shard_bytes",
        "20000",
    ]
    for workers in ("0", "2"):
        output = tmp_path / workers
        message = refused(capsys, *flags, "--output", str(output), "--workers", workers)
        assert f"{tmp_path}/a.jsonl, line 151 is not JSON: Unterminated string" in message
        assert (
            "'skip_share' in its entry of data.source or data.validation (--skip_share of prepare)"
            in message
        )
    prepare.main([*flags, "--output", str(output), "--skip_share", "0.01", "--workers", "0"])
    assert "199 documents, 1 bad ones left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["my data", "a, b", "{c}", "it's,x"])
def test_the_folder_can_be_pasted_into_the_command_of_a_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    flags = ["--input", "a.txt", "--tokenizer", "bytes", "--workers", "0"]
    prepare.main([*flags, "--output", name])
    words = shlex.split(capsys.readouterr().out.partition("to train on them: ")[2])
    settings = [word.removeprefix("--config.") for word in words]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(config.Config())))
    assert config.load(str(path), settings).data.source == (Source((name,)),)


def test_the_folder_is_where_the_command_of_a_run_reads_it(texts, tmp_path, monkeypatch, capsys):
    """A shell leaves `~` as it is behind a `=`, and data.source takes it for the user's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    prepare.main(
        ["--input", f"{texts}/b.txt", "--tokenizer=bytes", "--output=~/out", "--workers=0"]
    )
    assert f"--config.data.source={tmp_path}/out " in capsys.readouterr().out
    assert prepare.main(["--inspect", "~/out"]) == 0


@pytest.mark.proof
def test_help_and_mistakes_need_no_jax():
    program = (
        "import sys\n"
        "from jaxscale import prepare\n"
        "try:\n"
        "    prepare.main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert 'jax' not in sys.modules\n"
        "assert 'grain' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--input PATH" in run.stdout


def test_a_run_reads_the_shards_and_keeps_their_tokenizer(prepared, tmp_path):
    from jaxscale.run.setup.text import open_text, open_tokenizer  # noqa: PLC0415

    folder, result = prepared

    def of(tokenizer: str, vocab_size: int = 300) -> config.Config:
        data = {"source": [str(folder)], "tokenizer": tokenizer, "seq_len": 32}
        return config.from_dict({"data": data, "model": {"vocab_size": vocab_size}})

    text = open_text(of("bpe:300"), tmp_path / "run")
    assert text.heldout
    assert text.train.num_tokens + text.heldout.num_tokens == result["num_tokens"]
    assert not list((tmp_path / "run").glob("tokens/*")), "nothing is tokenised again"
    kept = open_tokenizer(of("bpe:300"), tmp_path / "run")  # without the folder
    assert kept.fingerprint == text.tokenizer.fingerprint
    named = open_text(of(str(folder / "tokenizer.json")), tmp_path / "other")
    assert named.train.fingerprint == text.train.fingerprint
    with pytest.raises(ValueError, match=r"'bytes' is not the tokenizer of .*set data.tokenizer ="):
        open_text(of("bytes"), tmp_path / "other")
    with pytest.raises(ValueError, match=r"model.vocab_size = 299 is smaller than the 300 tokens"):
        open_text(of("bpe:300", 299), tmp_path / "other")


def test_the_examples_of_other_shards_are_not_those_of_a_run(prepared, texts, tmp_path):
    """What makes a run refuse to resume from its checkpoint: `trainer` compares fingerprints."""
    folder, _ = prepared
    changed = (texts / "a.jsonl").read_text().replace("the 7th cat", "the 7th dog")
    (tmp_path / "a.jsonl").write_text(changed)
    for name, field_of in (("same", texts), ("other", tmp_path)):
        prepare.main(
            [
                "--input",
                f"{field_of}/a.jsonl",
                "--field",
                "body",
                "--workers",
                "0",
                "--tokenizer",
                str(folder / "tokenizer.json"),
                "--shard_bytes",
                "20000",
                "--output",
                str(tmp_path / name),
            ]
        )
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    first, same, other = (
        open_corpus([str(place)], tokenizer).fingerprint
        for place in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert first == same != other
