"""What Kubernetes makes of `args` and of the values of `env`, as its documentation and its source say.

The API reference of Container.args: "Variable references $(VAR_NAME) are expanded using the container's environment.
If a variable cannot be resolved, the reference in the input string will be unchanged. Double $$ are reduced to a single
$, which allows for escaping the $(VAR_NAME) syntax".
The rest as in `third_party/forked/golang/expansion/expand.go` of Kubernetes.
"""

import re
from collections.abc import Mapping
from typing import Any

REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda it: it[1] or variables.get(it[2], it[0]), text)


def variables_of(container: Mapping[str, Any], index: int, labels: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container of pod number `index`; a value may name variables before it."""
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in container["env"]:
        if "value" in variable:
            found[variable["name"]] = expanded(variable["value"], found)
        elif "fieldRef" in variable["valueFrom"]:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            found[variable["name"]] = labels[path.removeprefix("metadata.labels['").removesuffix("']")]
        else:
            found[variable["name"]] = "a secret"
    return found


def words_of(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    return [expanded(word, variables) for word in (*container["command"], *container["args"])]
