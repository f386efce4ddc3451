"""Roles of columns in `schema.pbtxt`, and the errors of invalid ones."""

import re
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.features import ROLES, Feature, load_features


def load(tmp_path: Path, text: str):
    path = tmp_path / "schema.pbtxt"
    path.write_text(text)
    return load_features(path)


GOOD = """
feature { name: "clicked" type: INT annotation { tag: "label" } presence { min_fraction: 1 }
          int_domain { min: 0 max: 1 } }
feature { name: "history" type: INT annotation { tag: "sparse" } value_count { min: 0 } }
feature { name: "price" type: FLOAT annotation { tag: "dense" } float_domain { min: -0.5 } }
feature { name: "title" type: BYTES annotation { tag: "kept" } presence { min_fraction: 0.5 } }
feature { name: "big" type: INT annotation { tag: "sparse" }
          int_domain { max: 9223372036854775807 } }
"""


def test_load_features_gives_back_each_declaration(tmp_path: Path) -> None:
    features = load(tmp_path, GOOD)
    assert features.features == (
        Feature(
            name="clicked",
            role="label",
            type="INT",
            is_list=False,
            required=True,
            minimum=0,
            maximum=1,
        ),
        Feature(name="history", role="sparse", type="INT", is_list=True, required=False),
        Feature(
            name="price", role="dense", type="FLOAT", is_list=False, required=False, minimum=-0.5
        ),
        Feature(name="title", role="kept", type="BYTES", is_list=False, required=False),
        Feature(
            name="big",
            role="sparse",
            type="INT",
            is_list=False,
            required=False,
            maximum=(1 << 63) - 1,
        ),
    )
    assert features.names == ("clicked", "history", "price", "title", "big")
    assert features.with_role("sparse") == ("history", "big")
    assert features.label == "clicked"
    assert "price" in features
    assert "none" not in features
    assert features["price"].minimum == -0.5


def test_load_features_keeps_the_limits_of_ints_exact(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD)["big"].maximum == (1 << 63) - 1


@pytest.mark.parametrize("role", ROLES)
def test_load_features_knows_each_role(tmp_path: Path, role: str) -> None:
    text = f'feature {{ name: "a" type: INT annotation {{ tag: "{role}" }} }}'
    assert load(tmp_path, text)["a"].role == role


ALL_ROLES = "sparse, dense, label, weight, label_time, kept"
ERRORS = {
    "no role": (
        'feature { name: "a" type: INT }',
        f"feature 'a' must have one role tag, got [] in @; use one of {ALL_ROLES}",
    ),
    "two roles": (
        'feature { name: "a" type: INT annotation { tag: "dense" tag: "label" } }',
        f"feature 'a' must have one role tag, got ['dense', 'label'] in @; use one of {ALL_ROLES}",
    ),
    "unknown role": (
        'feature { name: "a" type: INT annotation { tag: "sprase" } }',
        "feature 'a' must have one role tag, got ['sprase'] in @; did you mean 'sparse'?",
    ),
    "no type": (
        'feature { name: "a" annotation { tag: "dense" } }',
        "feature 'a' must have type INT, FLOAT or BYTES, got TYPE_UNKNOWN in @; add it",
    ),
    "struct": (
        'feature { name: "a" type: STRUCT annotation { tag: "dense" } }',
        "feature 'a' must have type INT, FLOAT or BYTES, got STRUCT in @; add it",
    ),
    "twice": (
        'feature { name: "a" type: INT annotation { tag: "dense" } }\n' * 2,
        "duplicate feature: 'a' in @; keep one",
    ),
    "domain": (
        'feature { name: "a" type: INT annotation { tag: "dense" } int_domain { min: 3 max: 1 } }',
        "feature 'a' must have a domain from min to max, got 3 to 1 in @; swap them",
    ),
    "no Schema": (
        "features { }",
        "schema is not a tensorflow-metadata Schema in text form: 1:1 : Message type "
        '"tensorflow.metadata.v0.Schema" has no field named "features". in @; see docs/job.md',
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_load_features_of_a_wrong_schema_raises(tmp_path: Path, text: str, message: str) -> None:
    whole = message.replace("@", str(tmp_path / "schema.pbtxt"))
    with pytest.raises(SchemaError, match=f"^{re.escape(whole)}$"):
        load(tmp_path, text)


LABELS = {
    "none": ("", "schema must have one label, got []; tag one feature"),
    "two": (
        'feature { name: "a" type: INT annotation { tag: "label" } }\n'
        'feature { name: "b" type: INT annotation { tag: "label" } }\n',
        "schema must have one label, got ['a', 'b']; tag one feature",
    ),
}


@pytest.mark.parametrize(("text", "message"), LABELS.values(), ids=LABELS.keys())
def test_label_of_a_schema_without_exactly_one_raises(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        _ = load(tmp_path, text).label


def test_feature_that_is_not_declared_names_the_nearest(tmp_path: Path) -> None:
    message = (
        "feature is not declared: 'hist0ry'; did you mean 'history'? If not, add it to the schema"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        _ = load(tmp_path, GOOD)["hist0ry"]


def test_schema_nested_deep_is_refused_in_one_line(tmp_path: Path) -> None:
    depth = 20_000
    text = 'feature { name: "x" struct_domain { ' * depth + "} }" * depth
    with pytest.raises(SchemaError, match="braces of the schema are nested too deeply") as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../x", "a/../../b", "/etc/passwd", "..", ""])
def test_name_that_would_lead_out_of_the_dataset_is_refused(name: str, tmp_path: Path) -> None:
    text = f'feature {{ name: "{name}" type: INT annotation {{ tag: "sparse" }} }}'
    with pytest.raises(SchemaError, match=re.escape(f"got {name!r}")):
        load(tmp_path, text)
