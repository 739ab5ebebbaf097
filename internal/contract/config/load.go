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

// Load reads the file at path ("" reads none), then env (in the format of [os.Environ]), then set (each
// path=value). It applies the defaults and checks everything. It reads only the files that the
// configuration names, and connects to nothing. The strings are warnings. The error is a [*Problems].
//
// A variable OUTRELAY_… that is not a key is an error if its name is similar to a key, and a warning
// otherwise: a Kubernetes service called outrelay adds such variables to every pod.
func Load(path string, env, set []string) (Config, []string, error) {
	return LoadOver(Default(), path, env, set)
}

// LoadOver is Load with other defaults.
func LoadOver(defaults Config, path string, env, set []string) (Config, []string, error) {
	cfg, _, warnings, err := loadWithReferences(defaults, path, env, set, &Problems{})
	return cfg, warnings, err
}

// LoadWithoutSecrets is [Load] for a machine that does not have the secrets of the configuration. If a reference names a file or a
// variable that does not exist here, or a certificate does not exist, the value is not checked, and a warning names it. Everything else
// is checked. The values that are not checked are missing in the configuration, so it is for commands that connect to nothing.
func LoadWithoutSecrets(path string, env, set []string) (Config, []string, error) {
	cfg, _, warnings, err := loadWithReferences(Default(), path, env, set, &Problems{withoutSecrets: true})
	return cfg, warnings, err
}

// loadWithReferences is LoadOver. It adds to problems, which is empty, and also returns the references by the paths of their
// keys.
func loadWithReferences(defaults Config, path string, env, set []string, problems *Problems) (
	cfg Config, references map[string]resolvedText, warnings []string, err error,
) {
	values := layers{koanf.New("."), map[string]string{}, problems}
	document := loadFile(values.Koanf, path, problems)
	isInFile := values.Copy().Exists
	warnings = values.loadEnv(env)
	values.loadSet(set)

	cfg, references, found, err := decodeKeys(defaults, values.Raw(), env, problems)
	problems.setSources(values.sources, document, isInFile)
	return cfg, references, append(warnings, found...), err
}

// Resolve returns c with the defaults that depend on the host or on other values, and its warnings. It checks everything. The error
// is a [*Problems].
func (c Config) Resolve() (Config, []string, error) {
	problems := &Problems{}
	if c.Watcher == "" && c.Slots == 0 {
		problems.report("watcher", "no value, and none for slots", "start from the defaults: a literal has zeros in their place")
		return Config{}, nil, problems.asError()
	}
	c.setDerivedDefaults()
	c.validate(problems)
	if err := problems.asError(); err != nil {
		return Config{}, nil, err
	}
	return c, c.findWarnings(), nil
}

// decodeKeys decodes and checks keys. problems contains the problems found before.
func decodeKeys(defaults Config, keys map[string]any, env []string, problems *Problems) (
	cfg Config, references map[string]resolvedText, warnings []string, err error,
) {
	cfg = defaults
	decoder := decoder{problems: problems, expand: newExpander(env), references: map[string]resolvedText{}}
	decoder.decodeStruct(keys, reflect.ValueOf(&cfg).Elem(), "")
	// Documents of another program may be its business data, and a purge cannot be undone.
	if keys["retention"] == nil && cfg.readsForeignDocuments() {
		cfg.Retention = 0
	}
	cfg.setDerivedDefaults()
	cfg.validate(problems)

	// A problem may quote the value of a reference, which may be a secret.
	problems.hideReferences(decoder.references)
	if err := problems.asError(); err != nil {
		return Config{}, nil, problems.listUnchecked(), err
	}
	return cfg, decoder.references, append(problems.listUnchecked(), cfg.findWarnings()...), nil
}

// loadFile loads the file at path into values. It returns the parsed file, or nil if there is none or it cannot be loaded.
func loadFile(values *koanf.Koanf, path string, problems *Problems) *yaml.Node {
	if path == "" {
		return nil
	}
	defer func() { problems.fileLost = len(problems.List) > 0 }()

	text, err := os.ReadFile(path)
	// If the user has passed a connection string as the file, the problem must not show its login.
	if strings.Contains(path, "://") {
		path = NewURI(path).String()
	}
	if err != nil {
		problems.report(path, "cannot be read: "+fileErrorCause(err), "pass a readable YAML file, or no file to use only the environment")
		return nil
	}

	document := parseDocument(path, text, problems)
	if document == nil {
		return nil
	}
	if err := values.Load(rawbytes.Provider(text), koanfyaml.Parser()); err != nil {
		problems.report(path, redactYAMLError(err), "correct the YAML there")
	}
	return document
}

// parseDocument returns the YAML mapping that the file holds, or nil if there is none to load. It checks the cases that
// the YAML library accepts silently, or rejects with an error that quotes the file.
func parseDocument(path string, text []byte, problems *Problems) *yaml.Node {
	var doc, second yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	err := decoder.Decode(&doc)
	if errors.Is(err, io.EOF) {
		// The file is empty.
		return nil
	}
	if err != nil {
		problems.report(path, redactYAMLError(err), "correct the YAML there")
		return nil
	}

	if len(doc.Content) == 1 && doc.Content[0].Kind != yaml.MappingNode {
		if doc.Content[0].Tag == "!!null" {
			return nil
		}
		problems.report(path, "not a mapping of keys to values", "start with keys such as mongodb: and kafka:")
		return nil
	}
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		problems.report(path, "more than one YAML document", "keep one; the others would be ignored")
		return nil
	}
	if len(doc.Content) != 1 {
		return nil
	}
	return doc.Content[0]
}

// indexPattern matches the index of a list element in a path.
var indexPattern = regexp.MustCompile(`\[\d+\]`)

// quotedPattern matches the parts of the file that the YAML library quotes in errors: anchors, values and keys. One or two characters
// between quotation marks are those that the library expects.
var quotedPattern = regexp.MustCompile("`[^`]*`|'[^']*'|\"[^\"]*\"|(?s:invalid map key: .*)")

// redactYAMLError returns a syntax error without the parts that it quotes from the file.
func redactYAMLError(err error) string {
	return quotedPattern.ReplaceAllStringFunc(strings.TrimPrefix(err.Error(), "yaml: "), func(quoted string) string {
		if len(quoted) <= len("'xx'") && quoted[0] != '`' {
			return quoted
		}
		return "(not shown)"
	})
}

// reservedPrefixes are the prefixes of OUTRELAY_ variables that are not keys.
var reservedPrefixes = []string{"OUTRELAY_CONFIG", "OUTRELAY_CONTEXT", "OUTRELAY_TEST_", "OUTRELAY_CACHE", "OUTRELAY_SERVICE_", "OUTRELAY_PORT"}

// layers are the values of the file and, over them, those of the environment and of --set.
type layers struct {
	*koanf.Koanf
	sources  map[string]string // by the path of a value that is not that of the file: the variable or --set
	problems *Problems
}

func (l layers) loadEnv(env []string) (warnings []string) {
	names := make([]string, 0, len(envKeys))
	for name := range envKeys {
		names = append(names, name)
	}
	// Sorted, so that suggestions do not depend on the order of a map.
	slices.Sort(names)

	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		if !strings.HasPrefix(name, "OUTRELAY_") {
			continue
		}

		if path, known := envKeys[name]; known {
			// An empty variable counts as not set.
			if value != "" {
				l.mergeKey(path, value, name)
			}
			continue
		}

		// Variables of the command line and of tests have the same prefix.
		if slices.ContainsFunc(reservedPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			continue
		}
		if hint := hintOfFormerEnv(name); hint != "" {
			l.problems.report(name, "unknown environment variable", hint)
		} else if near := nearestEnv(name, names); near != "" {
			l.problems.report(name, "unknown environment variable", "did you mean "+near+"?")
		} else {
			warnings = append(warnings, "the environment variable "+name+" is not a configuration key and has no effect")
		}
	}
	return warnings
}

// hintOfFormerEnv returns what takes the place of a former variable, or "".
func hintOfFormerEnv(name string) string {
	for former, successor := range movedKeys {
		if name == EnvName(former) {
			return EnvName(successor) + " replaces it"
		}
	}
	for former, instead := range removedKeys {
		if name == EnvName(former) {
			return instead
		}
	}
	return ""
}

// nearestEnv is NearestName for environment variables. It is stricter: the start of the name must be similar too.
func nearestEnv(name string, names []string) string {
	const prefix = "OUTRELAY_"
	short := strings.TrimPrefix(name, prefix)
	if len(short) < 4 {
		return ""
	}

	near := NearestName(name, names)
	if near == "" {
		return ""
	}
	const startLength = 8
	nearShort := strings.TrimPrefix(near, prefix)
	start, nearStart := short[:min(len(short), startLength)], nearShort[:min(len(nearShort), startLength)]
	if NearestName(start, []string{nearStart}) == "" {
		return ""
	}
	return near
}

// SetFlag is the source of the values of the argument set of [Load].
const SetFlag = "--set"

func (l layers) loadSet(set []string) {
	for _, s := range set {
		path, value, ok := strings.Cut(s, "=")
		if !ok {
			l.problems.report(SetFlag, "a value without =", "write --set path=value")
			continue
		}
		l.mergeKey(path, value, SetFlag)
	}
}

// mergeKey merges one key with a value in text form. A list of words is split at commas; other lists and sections are YAML.
func (l layers) mergeKey(path, text, source string) {
	report := func(found, allowed string) {
		l.problems.List = append(l.problems.List, Problem{Path: path, Source: source, Found: found, Allowed: allowed})
	}

	// The key of a map may contain dots: topics.create.configs.retention.ms. Shorten the path until it is a known key.
	key, mapKey := path, ""
	goType, known := keyTypes[key]
	for !known && strings.Contains(key, ".") {
		i := strings.LastIndexByte(key, '.')
		key, mapKey = key[:i], path[i+1:]
		goType, known = keyTypes[key]
	}
	if !known || mapKey != "" && goType.Kind() != reflect.Map {
		report("unknown key", suggestKey(path))
		return
	}

	value, err := parseSetValue(goType, text)
	if mapKey != "" {
		value, err = map[string]any{mapKey: text}, nil
	}
	if err != nil {
		report("the value is not valid YAML", "write it as one line of YAML")
		return
	}

	// The innermost value gets its sections around it, from the last name to the first.
	for _, step := range slices.Backward(strings.Split(key, ".")) {
		value = map[string]any{step: value}
	}
	layer := koanf.New(".")
	if err := layer.Load(confmap.Provider(value.(map[string]any), ""), nil); err != nil {
		report("the value cannot be merged", "")
		return
	}
	if err := l.Merge(layer); err != nil {
		report("the value cannot be merged", "")
		return
	}
	for name, value := range layer.All() {
		// An empty section keeps the keys of the file.
		if section, ok := value.(map[string]any); !ok || len(section) > 0 {
			l.sources[name] = source
		}
	}
}

// parseSetValue parses the text of a value if it is a list or a section in YAML. It returns all other texts unchanged; the
// decoder parses them.
func parseSetValue(goType reflect.Type, text string) (any, error) {
	wordList := goType == reflect.TypeFor[[]string]() && !strings.HasPrefix(strings.TrimSpace(text), "[")
	_, isSection := sectionType(goType)
	isYAML := isSection || goType.Kind() == reflect.Slice || goType.Kind() == reflect.Map
	if wordList || !isYAML {
		return text, nil
	}

	var value any
	if err := yaml.Unmarshal([]byte(text), &value); err != nil {
		return nil, fmt.Errorf("parsing YAML: %s", redactYAMLError(err))
	}
	return value, nil
}
