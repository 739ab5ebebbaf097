package config

import (
	"bytes"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// Print is the configuration that [Load] returns, as YAML in which every secret is *** and every reference stands as it was
// written: what a reference stands for may be a secret, also at a key where none is expected. Without secrets, Load reads it
// again.
func Print(path string, env, set []string) (text string, warnings []string, err error) {
	c, refers, warnings, err := load(Default(), path, env, set)
	if err != nil {
		return "", warnings, err
	}
	var root yaml.Node
	if err := root.Encode(c); err != nil {
		panic("config: a configuration that cannot be printed: " + err.Error()) // every type in it can be
	}
	restore(&root, "", refers)

	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(&root); err != nil {
		panic("config: a configuration that cannot be printed: " + err.Error())
	}
	return b.String(), warnings, nil
}

// restore puts the references back that were written at path and below it.
func restore(n *yaml.Node, path string, refers map[string]resolved) {
	if r, ok := refers[path]; ok {
		text := r.text
		switch keyTypes[path] {
		case secretType:
			return
		case uriType:
			if text = NewURI(text).String(); text == mask { // the whole address is a reference: it is shown without its login
				return
			}
		}
		*n = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: text}
		return
	}
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			at := n.Content[i].Value
			if path != "" {
				at = path + "." + at
			}
			restore(n.Content[i+1], at, refers)
		}
	case yaml.SequenceNode:
		for i, item := range n.Content {
			restore(item, path+"["+strconv.Itoa(i)+"]", refers)
		}
	}
}
