package config

import (
	"reflect"
	"slices"
	"strings"
)

// rereadKeys are the secrets whose files are read again whenever they are needed. The driver of MongoDB cannot change the login of
// a client, so mongodb.uri is not one of them.
var rereadKeys = []string{"kafka.sasl.password", "kafka.sasl.token.oidc.client_secret"}

// signalKeys are the keys that a running process applies after SIGHUP.
var signalKeys = []string{"log.level", "http.admin.token", "http.admin.viewer_token"}

// When a change of a key applies, as docs/configuration.md writes it.
const (
	appliesAtRestart = "restart" // at the next start of the process
	AppliesOnSignal  = "SIGHUP"  // at once after SIGHUP
	appliesFromFile  = "file"    // the content of the file that the key names: at once; another file: at the next start
)

// AppliesWhen returns when a change of key applies: restart, SIGHUP ([AppliesOnSignal]) or file.
func AppliesWhen(key string) string {
	section, name, _ := strings.Cut(key, ".tls.")
	isFile := slices.Contains([]string{"ca", "cert", "key", "client_ca"}, name)
	switch {
	case slices.Contains(signalKeys, key):
		return AppliesOnSignal
	case slices.Contains(rereadKeys, key), key == "kafka.sasl.token.file":
		return appliesFromFile
	// The exporter of OTLP reads its files once.
	case isFile && section != "otel":
		return appliesFromFile
	}
	return appliesAtRestart
}

// DifferingKeys returns the keys in which two configurations differ, sorted. It never shows a value. An
// optional section that only one of them has is one key.
func DifferingKeys(a, b Config) []string {
	var keys []string
	appendDiffering(reflect.ValueOf(a), reflect.ValueOf(b), "", &keys)
	slices.Sort(keys)
	return keys
}

func appendDiffering(a, b reflect.Value, prefix string, keys *[]string) {
	for _, f := range fieldsOf(a.Type()) {
		before, after, path := a.Field(f.index), b.Field(f.index), prefix+f.name
		if reflect.DeepEqual(before.Interface(), after.Interface()) {
			continue
		}

		// Only the files of such a secret matter.
		if secret, ok := before.Interface().(Secret); ok && slices.Contains(rereadKeys, path) && secret.written != nil &&
			reflect.DeepEqual(secret.written, after.Interface().(Secret).written) {
			continue
		}

		_, isSection := sectionType(f.typ)
		if isSection && f.typ.Kind() == reflect.Pointer {
			// A section that only one side has differs as a whole.
			if before.IsNil() || after.IsNil() {
				isSection = false
			} else {
				before, after = before.Elem(), after.Elem()
			}
		}

		if isSection {
			appendDiffering(before, after, path+".", keys)
		} else {
			*keys = append(*keys, path)
		}
	}
}
