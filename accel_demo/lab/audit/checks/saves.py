"""Can the saved weights be loaded without the wrapper of DistributedDataParallel or compilation?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import NOTE, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "11_from_one_process_to_many"  # "Common mistakes"
COMPILED_PAGE = "37_compilation"  # "Common mistakes"
WHOLE_PAGE = "91_then_and_now"  # "Why `torch.load` refuses a file from `torch.save(net)`"


def check(evidence: Evidence) -> Iterator[Finding]:
    saved = any(event["how"] == "save" for rank in evidence.ranks for event in rank.of("file"))
    if not saved and not any(evidence.counts("model saved")):
        raise NotChecked("nothing was saved with torch.save or safetensors")
    kinds = {
        (event["prefix"], event["whole"])
        for rank in evidence.ranks
        for event in rank.of("model saved")
    }
    for prefix, whole in sorted(kinds):
        page = COMPILED_PAGE if prefix == "_orig_mod." else PAGE if prefix else WHOLE_PAGE
        if prefix:
            sentence = f'The names of the saved tensors begin with "{prefix}", so only a wrapped '
            sentence += "model can load them."
        else:
            sentence = f"A whole {whole} is saved with its class, not only its tensors."
        finding = Finding(
            NOTE,
            "saves",
            sentence,
            "Save model.module.state_dict(), or accelerator.unwrap_model(model).state_dict().",
            page,
        )
        for rank in evidence.ranks:
            for event in rank.of("model saved"):
                if (event["prefix"], event["whole"]) == (prefix, whole):
                    finding.add_place(event["line"], rank.number)
        yield finding
