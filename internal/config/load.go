package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"

	koanfyaml "github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/rawbytes"
	"github.com/knadh/koanf/v2"
	"go.yaml.in/yaml/v3"
)

// Load reads the file at path ("" reads none), then env (as [os.Environ] has it), then set (each path=value), applies
// the defaults and checks everything. It touches the named files and nothing else. The error is a [*Problems].
//
// A variable OUTRELAY_… that is no key is an error when it is close to one and a warning otherwise: a Kubernetes service
// called outrelay puts such names into every pod.
func Load(path string, env, set []string) (Config, []string, error) {
	return LoadOver(Default(), path, env, set)
}

// LoadOver is Load with other defaults.
func LoadOver(defaults Config, path string, env, set []string) (Config, []string, error) {
	c, _, warnings, err := load(defaults, path, env, set)
	return c, warnings, err
}

// load is LoadOver. refers has the references by the paths at which they stand.
func load(defaults Config, path string, env, set []string) (c Config, refers map[string]resolved, warnings []string, err error) {
	p := &Problems{}
	k := koanf.New(".")
	loadFile(k, path, p)
	warnings = loadEnv(k, env, p)
	loadSet(k, set, p)

	c = defaults
	d := decoder{problems: p, expand: expander(env), refers: map[string]resolved{}}
	d.structure(k.Raw(), reflect.ValueOf(&c).Elem(), "")
	c.derive()
	c.validate(p)
	p.hide(d.refers)
	if err := p.err(); err != nil {
		return Config{}, nil, warnings, err
	}
	return c, d.refers, append(warnings, c.warnings()...), nil
}

func loadFile(k *koanf.Koanf, path string, p *Problems) {
	if path == "" {
		return
	}
	text, err := os.ReadFile(path)
	if strings.Contains(path, "://") { // an address in the wrong place
		path = NewURI(path).String()
	}
	if err != nil {
		p.add(path, "cannot be read: "+cause(err), "name a readable YAML file, or none to take everything from the environment")
		return
	}
	if !checkShape(path, text, p) {
		return
	}
	if err := k.Load(rawbytes.Provider(text), koanfyaml.Parser()); err != nil {
		p.add(path, yamlError(err), "")
	}
}

// checkShape looks at what the YAML library would accept in silence, or refuse by quoting the file.
func checkShape(path string, text []byte, p *Problems) bool {
	var doc, second yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return false // an empty file is no file
	case err != nil:
		p.add(path, yamlError(err), "")
		return false
	}
	if len(doc.Content) == 1 && doc.Content[0].Kind != yaml.MappingNode {
		if doc.Content[0].Tag == "!!null" {
			return false
		}
		p.add(path, "not a mapping of keys to values", "begin with keys such as mongodb: and kafka:")
		return false
	}
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		p.add(path, "more than one YAML document", "keep one; the rest would be ignored")
		return false
	}
	return true
}

var indices = regexp.MustCompile(`\[\d+\]`)

// yamlValue finds what the YAML library quotes from the file: names of anchors, values, keys.
var yamlValue = regexp.MustCompile("`[^`]*`|'[^']{3,}'|\"[^\"]{3,}\"|(?s:invalid map key: .*)")

// yamlError is a syntax error without what it quotes from the file.
func yamlError(err error) string {
	return yamlValue.ReplaceAllString(strings.TrimPrefix(err.Error(), "yaml: "), "(not shown)")
}

// reserved are variables of our own that are no keys.
var reserved = []string{"OUTRELAY_CONFIG", "OUTRELAY_TEST_", "OUTRELAY_CACHE", "OUTRELAY_SERVICE_", "OUTRELAY_PORT"}

func loadEnv(k *koanf.Koanf, env []string, p *Problems) (warnings []string) {
	names := make([]string, 0, len(envKeys))
	for name := range envKeys {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, "OUTRELAY_") {
			continue
		}
		path, known := envKeys[name]
		switch {
		case known && value == "": // set and empty is unset
		case known:
			put(k, path, value, name, p)
		case slices.ContainsFunc(reserved, func(r string) bool { return strings.HasPrefix(name, r) }):
		default:
			if near := nearestEnv(name, names); near != "" {
				p.add(name, "unknown environment variable", "did you mean "+near+"?")
			} else {
				warnings = append(warnings, "the environment variable "+name+" is no configuration key and has no effect")
			}
		}
	}
	return warnings
}

// nearestEnv is stricter than nearest: only a slip of two letters is taken for a mistake.
func nearestEnv(name string, names []string) string {
	const prefix = "OUTRELAY_"
	short := strings.TrimPrefix(name, prefix)
	if len(short) < 4 {
		return ""
	}
	near := nearest(name, names)
	if near != "" && nearest(short[:min(len(short), 8)], []string{strings.TrimPrefix(near, prefix)[:min(len(near)-len(prefix), 8)]}) != "" {
		return near
	}
	return ""
}

func loadSet(k *koanf.Koanf, set []string, p *Problems) {
	for _, s := range set {
		path, value, ok := strings.Cut(s, "=")
		if !ok {
			p.add("--set", "no = in it", "write --set path=value")
			continue
		}
		put(k, path, value, "--set "+path, p)
	}
}

// put merges one key given as text. Lists of words are split at commas; other lists and sections are YAML.
func put(k *koanf.Koanf, path, text, origin string, p *Problems) {
	key, rest := path, ""
	t, known := keyTypes[key]
	for !known && strings.Contains(key, ".") { // topics.create.configs.retention.ms: a key of a map may hold dots
		i := strings.LastIndexByte(key, '.')
		key, rest = key[:i], path[i+1:]
		t, known = keyTypes[key]
	}
	if !known || rest != "" && t.Kind() != reflect.Map {
		p.add(path, "unknown key", suggestion(path))
		return
	}
	value, err := fromText(t, text)
	if rest != "" {
		value, err = map[string]any{rest: text}, nil
	}
	if err != nil {
		p.add(origin, "not a value for "+path, "give it as one line of YAML")
		return
	}
	steps := strings.Split(key, ".")
	for _, step := range slices.Backward(steps) {
		value = map[string]any{step: value}
	}
	if err := k.Load(confmap.Provider(value.(map[string]any), ""), nil); err != nil {
		p.add(origin, "cannot be merged", "")
	}
}

func fromText(t reflect.Type, text string) (any, error) {
	_, isSection := section(t)
	switch {
	case t == reflect.TypeFor[[]string]() && !strings.HasPrefix(strings.TrimSpace(text), "["):
		return text, nil // the decoder splits it
	case isSection, t.Kind() == reflect.Slice, t.Kind() == reflect.Map:
		var v any
		if err := yaml.Unmarshal([]byte(text), &v); err != nil {
			return nil, fmt.Errorf("not YAML: %s", yamlError(err))
		}
		return v, nil
	}
	return text, nil
}
