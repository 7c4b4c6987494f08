"""The base class of all sections of the config, and how a form folds away rarely used fields.

    Optimizer = Annotated[T, Folded("optimizer")]

    class Stage(Section):
        adam_beta1: Optimizer[float] = 0.9

YAML files and command line have the flat name (`adam_beta1`) only. The form that Prefect generates from the JSON schema shows a
group as a line that opens on demand, and sends back `{"optimizer": {"adam_beta1": 0.9}}`, which is read as the flat field.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MAX_TEXT = 100_000
"""Longest text in a config, in characters. The longest one that makes sense is a system prompt."""
FLAT = {"flat": True}
"""Validation context of a YAML file: the groups of a form are unknown keys there."""

UNMERGED = "model -model.merged_dtype -model.merged_system_prompt"
"""The model without the settings of its merge: to merge in another precision is no reason to train or evaluate again."""
Paths = dict[str, "Paths"]
"""Names of fields, each with those below it; none below: all of it."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Marks a field that a form folds away, in the group of this name."""

    group: str


T = TypeVar("T")
Details = Annotated[T, Folded("details")]


class Section(BaseModel):
    """A section of the config. The docstrings of its fields are their descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        # A limit of .inf or a rate of .nan passes every comparison and is noticed hours later. JSON can hold neither.
        allow_inf_nan=False,
        str_max_length=MAX_TEXT,
        # A user may have typed a secret into the wrong field.
        hide_input_in_errors=True,
        field_title_generator=lambda name, _: _words(name),
        model_title_generator=lambda model: _words(model.__name__.removesuffix("Config")),
    )

    GROUPS: ClassVar[dict[str, list[str]]] = {}
    """Fields that a form folds away, by the name of their group."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.GROUPS = {}
        for name, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Folded):
                    cls.GROUPS.setdefault(mark.group, []).append(name)

    def _faults(self) -> Iterator[str]:
        """What is wrong with settings that are each valid alone, with the fix. The first fault is reported."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_faults(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, given: Any, info: ValidationInfo) -> Any:
        if info.context == FLAT or not isinstance(given, Mapping):
            return given
        flat = {name: value for name, value in given.items() if name not in cls.GROUPS}
        for group, members in cls.GROUPS.items():
            folded = given.get(group) or {}
            if not isinstance(folded, Mapping):
                raise ValueError(f"{group} groups fields and is not one itself; fix: {group}: {{{members[0]}: ...}}")
            twice = sorted(flat.keys() & folded.keys())
            if twice:
                raise ValueError(f"{twice[0]} is set twice, directly and in {group}; fix: set it once")
            flat |= folded
        # A section that the form shows as "Defaults" arrives as null.
        return {name: value for name, value in flat.items() if value is not None or not cls._folds(name)}

    @classmethod
    def _folds(cls, name: str) -> bool:
        # A section with defaults, which a form can show as one line.
        field = cls.model_fields.get(name)
        kind = field.annotation if field is not None and not field.is_required() else None
        return isinstance(kind, type) and issubclass(kind, Section)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema with rarely used fields moved into groups, which come last, and sections that open on demand."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        properties = schema.get("properties", {})
        for name, field in properties.items():
            if "description" in field:
                # Prefect shows a description as HTML, where <answer> would be a tag and vanish.
                field["description"] = field["description"].replace("<", "&lt;")
            if cls._folds(name) and "$ref" in field:
                field |= {"anyOf": [{"$ref": field.pop("$ref")}, {"type": "null", "title": "Defaults"}], "default": None}
        for group, members in cls.GROUPS.items():
            folded = {name: properties.pop(name) for name in members}
            _number(folded)
            shown = {"title": "Show", "type": "object", "additionalProperties": False, "properties": folded}
            properties[group] = {
                "title": _words(group),
                "description": f"Rarely changed: {', '.join(members)}.",
                "anyOf": [shown, {"type": "null", "title": "Defaults"}],
                "default": None,
            }
        _number(properties)
        return made


def form_values(tree: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """The settings of a YAML file in the shape of the section's form, grouped fields in their groups."""
    group_of = {name: group for group, members in section.GROUPS.items() for name in members}
    values: dict[str, Any] = {}
    for name, value in tree.items():
        inner = section_in(section.model_fields[name].annotation)[0] if name in section.model_fields else None
        shaped = value if inner is None else _shape(value, inner)
        target = values.setdefault(group_of[name], {}) if name in group_of else values
        target[name] = shaped
    return values


def _number(properties: dict[str, Any]) -> None:
    # Prefect's form orders fields by `position`, because PostgreSQL does not keep the order of keys.
    for position, field in enumerate(properties.values()):
        field["position"] = position


def _shape(value: Any, section: type[Section]) -> Any:
    if isinstance(value, list):
        return [_shape(item, section) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() <= section.model_fields.keys():
        return form_values(value, section)
    return {name: _shape(item, section) for name, item in value.items()}


def section_in(annotation: Any, marker: str = "") -> tuple[type[Section] | None, str]:
    """The section that a field holds, and how a place names one of several: [] or .NAME."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, marker
    marker = {"list": "[]", "dict": ".NAME"}.get(getattr(get_origin(annotation), "__name__", ""), marker)
    found = (section_in(argument, marker) for argument in get_args(annotation))
    return next((one for one in found if one[0] is not None), (None, marker))


def fields_below(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field and section below a section with its place, for example stages[].learning_rate."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner, marker = section_in(field.annotation)
        if inner is not None:
            yield from fields_below(inner, f"{prefix}{name}{marker}.")


def _words(name: str) -> str:
    """LoraTraining or lora_training -> Lora training."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).replace("_", " ")
    return spaced.strip().capitalize()


Viewed = TypeVar("Viewed", bound=Section)


def view(config: Viewed, reads: str) -> Viewed:
    """A copy of the config that has only these settings. Its methods work if they need no other.

        view(config, "difficulty model -model.lora stages.rewards")

    has the section `difficulty`, the section `model` without `lora`, and of each stage its `rewards`. A path goes through lists
    and mappings. Reading anything else raises AttributeError, as does a path to nothing, so a step cannot depend on a setting
    that its key does not hold.
    """
    kept: Paths = {}
    left_out: Paths = {}
    for path in reads.split():
        below = left_out if path[0] == "-" else kept
        for name in path.removeprefix("-").split("."):
            below = below.setdefault(name, {})
    part: Viewed = _part(config, kept, left_out)
    return part


def _part(value: Any, kept: Paths, left_out: Paths) -> Any:
    if isinstance(value, list):
        return [_part(item, kept, left_out) for item in value]
    if isinstance(value, dict):
        return {name: _part(item, kept, left_out) for name, item in value.items()}
    if not isinstance(value, Section) or not (kept or left_out):
        return value
    fields = type(value).model_fields
    if unknown := (kept.keys() | left_out.keys()) - fields.keys():
        raise AttributeError(f"{type(value).__name__} has no setting {', '.join(sorted(unknown))}")
    gone = {name for name, below in left_out.items() if not below}
    names = [name for name in kept or fields if name not in gone and name in value.__dict__]
    part = value.model_copy()
    part.__dict__.clear()
    part.__dict__.update({name: _part(getattr(value, name), kept.get(name, {}), left_out.get(name, {})) for name in names})
    return part
