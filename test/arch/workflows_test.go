package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	testCommand = regexp.MustCompile(`go test (\./\S+) (.*)`)
	// testFlag is a flag of a test program, such as -fault.for. Its name begins with a subject and a dot.
	testFlag = regexp.MustCompile(`(?:^| )-([a-z]+\.[a-z]+)`)
)

// TestCommandsPassFlagsThatExist: each flag that a workflow or the page about tests passes to a package is defined there.
func TestCommandsPassFlagsThatExist(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../.github/workflows/*.yml")
	if err != nil {
		t.Fatal(err)
	}

	count := 0
	for _, file := range append(files, "../../docs/testing.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range testCommand.FindAllStringSubmatch(string(text), -1) {
			for _, name := range testFlag.FindAllStringSubmatch(command[2], -1) {
				count++
				if !definesFlag(t, filepath.Join("../..", command[1]), name[1]) {
					t.Errorf("%s passes -%s to %s, whose tests do not define it", filepath.Base(file), name[1], command[1])
				}
			}
		}
	}
	if count < 8 {
		t.Errorf("only %d flags were found", count)
	}
}

// definesFlag reports whether a test file of the directory defines a flag of this name.
func definesFlag(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), `("`+name+`",`) {
			return true
		}
	}
	return false
}

// idleSuccess is a step of CI that notes a check that it cannot make, and succeeds.
var idleSuccess = regexp.MustCompile(`(?m)^.*\bnote\b.*\n\s*(?:return|exit) 0$`)

// TestStepsOfCIDoNotSucceedIdly: a complete run fails if it cannot make a check. Elsewhere the end of the output lists the check.
func TestStepsOfCIDoNotSucceedIdly(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"run", "docs"} {
		text, err := os.ReadFile(filepath.Join("../../.ci", file))
		if err != nil {
			t.Fatal(err)
		}

		for _, step := range idleSuccess.FindAllString(string(text), -1) {
			t.Errorf(".ci/%s succeeds without a check; call skipped:\n%s", file, step)
		}
	}
}
