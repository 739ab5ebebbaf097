package config

import (
	"errors"
	"io/fs"
	"os"
	"strings"
)

// newExpander returns a function that replaces the references ${env:NAME} and ${file:/path} in a
// string. $${ stands for ${. It does not expand the inserted text. An error names the variable or the
// file, and never quotes its content.
func newExpander(env []string) func(string) (string, error) {
	vars := make(map[string]string, len(env))
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		vars[name] = value
	}

	return func(source string) (string, error) {
		var out strings.Builder
		for {
			i := strings.Index(source, "${")
			if i < 0 {
				out.WriteString(source)
				return out.String(), nil
			}
			// The text after a reference is continued, and the inserted text is not, so values cannot contain
			// references.
			if i > 0 && source[i-1] == '$' {
				out.WriteString(source[:i-1] + "${")
				source = source[i+2:]
				continue
			}

			out.WriteString(source[:i])
			reference, rest, closed := strings.Cut(source[i+2:], "}")
			if !closed {
				return "", errors.New("a ${ without a closing }")
			}
			text, err := resolveReference(reference, vars)
			if err != nil {
				return "", err
			}
			out.WriteString(text)
			source = rest
		}
	}
}

// absentError is the error of a reference to a file or a variable that does not exist.
type absentError struct{ text string }

func (e *absentError) Error() string { return e.text }

// resolveReference returns the value of a reference such as env:NAME. The line break at the end of a
// file is removed.
func resolveReference(reference string, vars map[string]string) (string, error) {
	kind, name, _ := strings.Cut(reference, ":")
	switch kind {
	case "env":
		if value, ok := vars[name]; ok {
			return value, nil
		}
		return "", &absentError{"the environment variable " + name + " is not set"}

	case "file":
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			return "", &absentError{describeUnreadable(name, err)}
		}
		if err != nil {
			return "", errors.New(describeUnreadable(name, err))
		}
		return strings.TrimRight(string(text), "\r\n"), nil
	}
	return "", errors.New("a reference that is neither ${env:NAME} nor ${file:/path}; write $${ for a literal ${")
}
