package config

import (
	"bytes"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// Print returns the configuration that [Load] returns, as YAML. Each secret is ***, and each reference
// is printed as it was written, because its value may be a secret even at a key that is not secret. If
// there are no secrets, Load can read the text.
func Print(path string, env, set []string) (text string, warnings []string, err error) {
	cfg, references, warnings, err := loadWithReferences(Default(), path, env, set, &Problems{})
	if err != nil {
		return "", warnings, err
	}

	return cfg.printYAML(references), warnings, nil
}

// YAML returns the configuration as YAML. Each secret is ***.
func (c Config) YAML() string { return c.printYAML(nil) }

func (c Config) printYAML(references map[string]resolvedText) string {
	// All types in the configuration can be encoded.
	var root yaml.Node
	if err := root.Encode(c); err != nil {
		panic("config: encoding the configuration: " + err.Error())
	}
	restoreReferences(&root, "", references)

	var buffer bytes.Buffer
	encoder := yaml.NewEncoder(&buffer)
	encoder.SetIndent(2)
	if err := encoder.Encode(&root); err != nil {
		panic("config: encoding the configuration: " + err.Error())
	}
	return buffer.String()
}

// restoreReferences replaces the values at path and below it by the references that were written there.
func restoreReferences(n *yaml.Node, path string, references map[string]resolvedText) {
	if resolvedText, ok := references[path]; ok {
		text := resolvedText.text
		switch keyTypes[path] {
		case secretType:
			return
		case uriType:
			// If the whole address is a reference, the node already shows the address without its login.
			if text = NewURI(text).String(); text == mask {
				return
			}
		}
		*n = yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: text}
		return
	}

	// References stand at leaves, so sections and lists are searched.
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			at := n.Content[i].Value
			if path != "" {
				at = path + "." + at
			}
			restoreReferences(n.Content[i+1], at, references)
		}
	case yaml.SequenceNode:
		for i, item := range n.Content {
			restoreReferences(item, path+"["+strconv.Itoa(i)+"]", references)
		}
	default: // It has no content.
	}
}
