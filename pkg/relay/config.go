package relay

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/config"
)

// Load returns the configuration in a YAML file, overridden by the variables OUTRELAY_… of environ,
// which has the format of [os.Environ]. An empty path reads no file, and nil no environment. Load
// replaces ${env:NAME} and ${file:path}. The error lists every problem, an unknown key among them.
func Load(path string, environ []string) (Config, error) {
	c, _, err := config.LoadOver(defaults(), path, environ, nil)
	if err != nil {
		return Config{}, fmt.Errorf("relay: %w", err)
	}
	return fromProgram(c), nil
}

// Validate returns every problem of the configuration in one error, with the fix for each, or nil. New
// returns the same error. Validate reads the files that the configuration names.
func (c Config) Validate() error {
	_, _, err := c.resolve()
	return err
}

// String returns the configuration with its defaults as YAML. Secrets are replaced by ***. If the
// configuration is invalid, String returns the problems.
func (c Config) String() string {
	resolved, _, err := c.resolve()
	if err != nil {
		return err.Error()
	}
	return resolved.YAML()
}

// defaults returns the defaults of the program, except that the relay does not listen: the service
// mounts [Relay.Handler].
func defaults() config.Config {
	d := config.Default()
	d.HTTP.Listen = "off"
	return d
}

// resolve returns the configuration of the program and its warnings.
func (c Config) resolve() (config.Config, []string, error) {
	resolved, warnings, err := config.FromKeys(defaults(), keysOf(reflect.ValueOf(c)))
	if err != nil {
		return config.Config{}, nil, fmt.Errorf("relay: %w", err)
	}
	return resolved, warnings, nil
}

// keysOf returns the keys of a section that are set, in the form of a parsed YAML file.
func keysOf(section reflect.Value) map[string]any {
	keys := map[string]any{}
	for i := range section.NumField() {
		value := section.Field(i)
		// The settings of new topics have no value for "none".
		_, isCreate := section.Interface().(Create)
		if value.IsZero() || isCreate && value.CanInt() && value.Int() < 0 {
			continue
		}

		// A section without a pointer is set only if one of its keys is.
		key := keyValue(value)
		if sub, ok := key.(map[string]any); ok && value.Kind() == reflect.Struct && len(sub) == 0 {
			continue
		}
		keys[section.Type().Field(i).Tag.Get("yaml")] = key
	}
	return keys
}

// keyValue returns a value of a parsed YAML file. Negative numbers, which mean none, are 0 there.
func keyValue(v reflect.Value) any {
	switch value := v.Interface().(type) {
	case time.Duration:
		return max(value, 0).String()
	case string:
		// The parts of a section or list are converted one by one.
		return literal(value)
	}

	switch v.Kind() {
	case reflect.Pointer:
		return keyValue(v.Elem())
	case reflect.Struct:
		return keysOf(v)
	case reflect.Int, reflect.Int64:
		return int(max(v.Int(), 0))
	case reflect.Slice:
		list := make([]any, v.Len())
		for i := range list {
			list[i] = keyValue(v.Index(i))
		}
		return list
	case reflect.Map:
		m := map[string]any{}
		for name, value := range v.Seq2() {
			m[name.String()] = literal(value.String())
		}
		return m
	default:
		return v.Interface()
	}
}

// literal escapes the start of a reference, because the values of a struct are used as they are.
func literal(text string) string { return strings.ReplaceAll(text, "${", "$${") }

// fromProgram returns the Config that resolves to c.
func fromProgram(c config.Config) Config {
	var out Config
	copySection(reflect.ValueOf(c), reflect.ValueOf(defaults()), reflect.ValueOf(&out).Elem())
	return out
}

// copySection copies the values of from that differ from their defaults into to. Both have the same
// fields.
func copySection(from, defaults, to reflect.Value) {
	for i := range from.NumField() {
		value, target := from.Field(i), to.Field(i)
		if defaults.IsValid() && reflect.DeepEqual(value.Interface(), defaults.Field(i).Interface()) {
			continue
		}
		copyValue(value, defaultField(defaults, i), target)
	}
}

func defaultField(defaults reflect.Value, i int) reflect.Value {
	if !defaults.IsValid() {
		return reflect.Value{}
	}
	return defaults.Field(i)
}

func copyValue(value, defaults, target reflect.Value) {
	switch v := value.Interface().(type) {
	case interface{ Reveal() string }:
		target.SetString(v.Reveal())
		return
	case config.Start:
		target.SetString(v.String())
		return
	}

	switch value.Kind() {
	case reflect.Struct:
		copySection(value, defaults, target)
	case reflect.Pointer:
		if !value.IsNil() {
			target.Set(reflect.New(target.Type().Elem()))
			copySection(value.Elem(), reflect.ValueOf(config.SectionDefault(value.Elem().Type())), target.Elem())
		}
	case reflect.Slice:
		list := reflect.MakeSlice(target.Type(), value.Len(), value.Len())
		for i := range value.Len() {
			copyValue(value.Index(i), reflect.Value{}, list.Index(i))
		}
		target.Set(list)
	case reflect.Int, reflect.Int64:
		n := value.Int()
		// Zero differs from the default here, so it means none.
		if n == 0 && defaults.IsValid() {
			n = -1
		}
		target.SetInt(n)
	case reflect.Bool:
		if target.Kind() == reflect.Pointer {
			b := value.Bool()
			target.Set(reflect.ValueOf(&b))
			return
		}
		target.SetBool(value.Bool())
	case reflect.String:
		target.SetString(value.String())
	default:
		target.Set(value)
	}
}
