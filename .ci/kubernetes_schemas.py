"""Writes the schemas of Kubernetes' resources that kubeconform needs, each as one file without references.

    python3 .ci/kubernetes_schemas.py WHEEL VERSION DIRECTORY

WHEEL is that of the package kubernetes-validate, which contains the schemas of all versions.
"""

import json
import sys
import zipfile

KINDS = [
    "configmap-v1", "deployment-apps-v1", "namespace-v1", "networkpolicy-networking-v1", "poddisruptionbudget-policy-v1", "secret-v1",
    "service-v1", "serviceaccount-v1",
]


def resolve(node, definitions):
    """Replaces each reference by what it refers to. The resources above contain no reference to themselves."""
    if isinstance(node, list):
        return [resolve(n, definitions) for n in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return resolve(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
    return {name: resolve(value, definitions) for name, value in node.items()}


def main(wheel, version, directory):
    with zipfile.ZipFile(wheel) as z:
        path = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict/"
        definitions = json.loads(z.read(path + "_definitions.json"))["$defs"]
        for kind in KINDS:
            schema = resolve(json.loads(z.read(path + kind + ".json")), definitions)
            schema.pop("$id", None)
            with open(f"{directory}/{kind}.json", "w") as f:
                json.dump(schema, f)


main(*sys.argv[1:])
