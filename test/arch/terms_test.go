package arch

import (
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// oneTerm maps other spellings of a term to the term that code, metrics, commands and documentation
// use.
var oneTerm = map[string]string{"take" + "-over": "takeover", "take" + "_over": "takeover", "time" + "-out": "timeout"}

// oneMeaning lists the words that had several meanings, or were one of several words for one thing. Each row says what to
// write instead, and the beginnings of the paths that it applies to; none means all files of the module.
var oneMeaning = []struct {
	word    string // a regular expression
	instead string
	in      []string
}{
	// An event is what a service appends. The entries about owners, nodes and operators are the audit log.
	{`[Ee]vents log|log of events|outrelay events|/api/v1/events|events_trimmed|outrelay_events`, "audit log", nil},
	{`Collection\("events"\)`, `Collection("audit")`, []string{"cmd/", "internal/", "test/"}},

	// Blocked is the state of an event after an earlier one of its key. A topic is unwritable.
	{`blocked_targets|BlockedTargets|[Bb]locked (topic|target)`, "unwritable", nil},

	// A lane is one of the 16 parts of a partition in a consumer.
	{`kafka\.lanes|"lanes"`, "kafka.requests_per_broker", nil},
	{`\b[Ll]anes\b`, "requests_per_broker", []string{"internal/contract/config/", "pkg/relay/", "outrelay.example.yaml", "outrelay.schema.json", "docs/configuration.md", "deploy/helm/outrelay/values.yaml"}},
	{`(?i)\blanes?\b`, "loop", []string{"internal/relay/internal/sink/", "internal/relay/internal/pipeline/", "internal/contract/record/"}},

	// A watermark is the first offset of a lane that a consumer has not handled. The relay has a position.
	{`(?i)watermark`, "position", []string{
		"internal/contract/config/", "pkg/relay/", "outrelay.example.yaml", "outrelay.schema.json", "docs/configuration.md", "deploy/", "internal/relay/internal/term/",
		"internal/base/metrics/metrics.go", "docs/operations.md", "docs/operate/", "internal/contract/record/",
	}},
	{`(?i)\b(the|a|no|of) watermark`, "resolved position", []string{"internal/relay/"}},

	// A dead letter is requeued; a replay sends delivered events again.
	{`"stand"|[Rr]eplayable\b|\.Replayed\b|"replayed"`, "requeued", []string{"cmd/", "internal/operate/admin/", "internal/relay/stored/letters/", "internal/relay/stored/requeues/", "internal/operate/httpapi/", "internal/operate/opspage/", "docs/"}},

	// After a takeover the stream rereads the events that the previous owner may have sent.
	{`(Begin|End|Is|Of)Replay|ReplayUntil|replayWindow|replay of a tail`, "reread", nil},

	// To adopt is to continue at the position of another publisher. The sink opens a topic.
	{`recover --adopt|recover/adopt|adopts? (the )?copied state|state is adopted`, "accept-copy", nil},
	{`"adopting"|(?i)adopt(s|ed|ing)? (the |a )?topics?\b|topic (is|was) (being )?adopted|isAdopted|adopter\b`, "open", []string{"internal/base/", "internal/contract/", "internal/relay/", "docs/metrics.md"}},

	// A topic that was parked is unparked.
	{`flows_again`, "topic_unparked", nil},

	// A fix is what to do about a problem.
	{`\bAdvice\b|[a-z]Advice\b|\badvice(For|Of)`, "Fix", []string{"internal/base/", "internal/contract/", "internal/kafkawire/", "internal/mongodb/", "internal/relay/"}},

	// Pending counts what the relay has not read yet. What it could not send waits.
	{`PendingTopic\b|/pending\b|showPending`, "waiting topics", nil},

	// An envelope that could not be sent in order waits.
	{`\b[Ee]xceptions? (of|wait|that wait)|(as|makes|of) an exception\b|outrelay_exceptions`, "waiting envelope", []string{"cmd/", "deploy/", "docs/", "internal/contract/", "internal/operate/", "internal/relay/", "test/"}},

	// A watcher is a name that processes share. What status shows are its slots.
	{`admin\.Watcher\b`, "admin.SlotStatus", nil},

	// A role is a set of rights, of a user or of a person. A process has tasks, and a phase in its watcher.
	{`HasRole|\bRole(Owner|Standby|Halted)\b|\broles(=|: \[)(relay|cleaner|admin)|(json|yaml):"roles?"`, "tasks, or phase", []string{
		"internal/contract/", "internal/relay/process/", "internal/relay/readiness/", "internal/relay/probes/", "internal/relay/stored/nodes/", "internal/operate/admin/", "pkg/relay/", "deploy/", "outrelay.example.yaml",
	}},

	// Who does not take something rejects it. Only connections are refused, as the system says.
	{`(?i)\brefus(e|es|ed|al|als|ing)\b|[a-z]Refus(e|ed|al)|\brefus(e|ed|al)[A-Z]`, "reject", nil},

	// A server sends a response. A reply is the event by which a service reacts to an event of a saga; people answer questions.
	{`(?i)\brepl(y|ies|ied|ying)\b|\banswer(s|ed|ing)?\b`, "response, or result", []string{
		"internal/", "pkg/bearer/", "pkg/codec/", "pkg/entity/", "pkg/event/", "pkg/inbox/", "pkg/operate/", "pkg/outbox/", "pkg/relay/", "deploy/",
		"docs/metrics.md", "docs/http-api.md", "docs/idempotency.md", "docs/operations.md", "docs/operate/", "docs/rules.md", "DESIGN.md",
	}},

	// Foreign is what another writer has written, not the CPU time of other programs.
	{`(?i)foreign_cpu\b|foreign_cpu_pct|foreign CPU`, "CPU of others", nil},

	// Behind is late, such as a watcher or a clock. The position that follows another one is after it.
	{`(?i)\bbehind (the|a|its|all|lowest) ?(lowest|closed|saved)? ?(position|cursor|cut|gate|gap|drop|takeover|checkpoint|refusal|fence)|CountBehind|SweptBehind|behind_the_position`, "after", nil},

	// A node without a heartbeat is stale.
	{`silent_node| \(silent\)|✕ silent`, "stale", nil},

	// Log lines have one key for the cause and one for the fix.
	{`\.(Debug|Info|Warn|Error)\(.*"(advice|hint|cause|err)", `, `"fix" and "error"`, []string{"cmd/", "internal/", "pkg/", "resume/"}},
	// A line about a failure names the consequence after it.
	{`\.(Warn|Error)\("(cannot [^";]*"|[^";]* (failed|fails); )`, `"cannot X; consequence"`, []string{"internal/relay/"}},
	// A topic that cannot be written has one wording, whatever waits for it.
	{`\.(Warn|Error)\("[^"]*(for a topic|(topic|target)[^";]* cannot be written|(topic is|partitions are) parked)`, `"cannot write a topic; consequence"`, []string{"internal/relay/"}},
	{`\.(Debug|Info|Warn|Error)\(.*"reason", err\b`, `"error"`, []string{"cmd/", "internal/", "pkg/", "resume/"}},
}

// refusedConnections are the words of systems and networks about a connection.
var refusedConnections = regexp.MustCompile(`(?i)connection( to \S+)?( is)? refused|ECONNREFUSED|refuse[sd]?\W{1,6}(its |the )?(\w+ )?connection|\+uri\+" refused`)

// oldTexts are the ends of the paths of texts that name what something was called before, or hold the words of this test.
var oldTexts = []string{"CHANGELOG.md", "test/arch/terms_test.go", "/former.go", "/former_test.go"}

func TestATermHasOneSpelling(t *testing.T) {
	t.Parallel()
	forEachText(t, func(path, text string) {
		for other, term := range oneTerm {
			if strings.Contains(strings.ToLower(text), other) {
				t.Errorf("%s contains %q: write %q", path, other, term)
			}
		}
	})
}

func TestAWordHasOneMeaning(t *testing.T) {
	t.Parallel()
	words := make([]*regexp.Regexp, len(oneMeaning))
	for i, row := range oneMeaning {
		words[i] = regexp.MustCompile(row.word)
	}

	forEachText(t, func(path, text string) {
		if slices.ContainsFunc(oldTexts, func(end string) bool { return strings.HasSuffix(path, end) }) {
			return
		}
		text = refusedConnections.ReplaceAllString(text, "")
		for i, row := range oneMeaning {
			applies := len(row.in) == 0 || slices.ContainsFunc(row.in, func(prefix string) bool { return strings.HasPrefix(path, prefix) })
			// Test data of other programs has words of its own.
			if !applies || strings.HasSuffix(path, "_test.go") && len(row.in) > 0 {
				continue
			}
			for _, at := range words[i].FindAllStringIndex(text, -1) {
				line := 1 + strings.Count(text[:at[0]], "\n")
				t.Errorf("%s:%d contains %q: write %s", path, line, text[at[0]:at[1]], row.instead)
			}
		}
	})
}

// forEachText calls read for each text file of the module, with its path from the root.
func forEachText(t *testing.T, read func(path, text string)) {
	t.Helper()
	root := os.DirFS("../..")
	files := 0

	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules"):
			return fs.SkipDir
		case d.IsDir() || !slices.ContainsFunc([]string{".go", ".md", ".json", ".yaml", ".html", ".js", ".css"}, func(end string) bool { return strings.HasSuffix(path, end) }):
			return nil
		}

		files++
		text, err := fs.ReadFile(root, path)
		read(path, string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 1000 {
		t.Errorf("read %d files, want all files of the module", files)
	}
}
