//go:build unix

package docs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// block is a console block.
type block struct {
	steps  []step
	reason string // why the test does not run the block; "" if it does
}

// step is a command with the output that the page shows after it.
type step struct {
	command string
	output  []string
}

var (
	consoleBlock = regexp.MustCompile("(?ms)^ *```console\n(.*?)^ *```")
	notRun       = regexp.MustCompile(`<!-- not run: (.+) -->\s*$`)
	otherShell   = regexp.MustCompile("(?m)^ *```(sh|bash|shell|zsh)\\b")
	anyMark      = regexp.MustCompile(`<!-- (not )?run`)
	comment      = regexp.MustCompile(`\s+#.*$`)
)

// mostReasonWords is how many words a reason has at most: a reader passes over it.
const mostReasonWords = 5

// findBlocks returns the console blocks of a page, in order. A mark that no block follows is an error.
func findBlocks(t *testing.T, name string) (blocks []block) {
	t.Helper()
	page, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}

	text, marked := string(page), 0
	if other := otherShell.FindString(text); other != "" {
		t.Errorf("%s has a block %s: commands belong into console blocks, which run", name, strings.TrimSpace(other))
	}
	for _, at := range consoleBlock.FindAllStringSubmatchIndex(text, -1) {
		b := block{}
		if mark := notRun.FindStringSubmatch(text[:at[0]]); mark != nil {
			b.reason = mark[1]
			marked++
			if words := len(strings.Fields(b.reason)); words > mostReasonWords {
				t.Errorf("%s: the reason %q has %d words, want at most %d", name, b.reason, words, mostReasonWords)
			}
		}

		for line := range strings.Lines(text[at[2]:at[3]]) {
			line = strings.TrimSpace(line)
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				b.steps = append(b.steps, step{command: comment.ReplaceAllString(command, "")})
			} else if n := len(b.steps); n > 0 && line != "" {
				b.steps[n-1].output = append(b.steps[n-1].output, line)
			}
		}
		if len(b.steps) == 0 {
			t.Errorf("%s: a console block without a command:\n%s", name, text[at[2]:at[3]])
		}
		blocks = append(blocks, b)
	}
	if n := len(anyMark.FindAllString(text, -1)); n != marked {
		t.Errorf("%s: %d marks, but a block follows %d of them", name, n, marked)
	}
	return blocks
}

// Each console block of the documentation runs, page after page, against a relay with events of all kinds. Each command has to end with
// 0, and to print the output that the page shows. A block that cannot run here states the reason, in a comment above it.
func TestConsoleBlocksRun(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/*/*.md", "../../deploy/*/*/*.md", "../../examples/*/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}

	run := 0
	for _, name := range files {
		var here []block
		for _, b := range findBlocks(t, name) {
			if b.reason == "" {
				here = append(here, b)
			}
		}
		if len(here) == 0 {
			continue
		}
		run += len(here)
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			d := newDesk(t, filepath.Base(name))
			for _, b := range here {
				for _, s := range b.steps {
					d.runStep(s)
				}
			}
		})
	}
	if run < 20 {
		t.Errorf("only %d blocks run", run)
	}
}

// desk is the place of a reader: a shell with outrelay on its PATH, and the configuration of a watcher.
type desk struct {
	t     *testing.T
	dir   string
	env   []string
	names *strings.Replacer // from the names in the pages to the names of the scene
}

// newDesk starts a relay for a page, with delivered events, and for waiting.md with events that wait for all reasons.
func newDesk(t *testing.T, page string) *desk {
	t.Helper()
	const token = "a-token-for-the-pages"
	s := kit.New(t, kit.Options{Types: []string{"order", "audit"}, Set: map[string]any{
		"http.admin": map[string]any{"listen": "127.0.0.1:0", "token": token},
		"retry":      map[string]any{"base": "1h", "cap": "1h"},
		// Other tests fill the oplog of the shared server, and doctor compares its time window with the retention.
		"retention": "3m",
	}})
	s.SetConfig("topics.allow", []string{s.TopicOf("order"), s.TopicOf("audit"), s.TopicOf("payment"), s.TopicOf("refund"), "payments.v2"})
	if page == "slots.md" {
		s.SetConfig("slots", 4)
	}
	relay := s.StartRelay()
	relay.WaitTookOver()
	_, address, _ := strings.Cut(relay.WaitForLog("operator's page and API are served"), "address=")
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "customer-17", 0, 30), kit.NewEvent("order", "customer-17", 1, 30))
	// Most commands reject to work before the first outbox exists.
	relay.WaitForLog("topic is open")
	if page == "waiting.md" {
		appendWaiting(t, s)
		giveUpMessages(t, s)
	}

	// A copy is declared as valid before its first relay starts.
	if page == "backup.md" {
		relay.Terminate()
		relay.WaitExit()
	}

	dir := t.TempDir()
	config := filepath.Join(dir, "outrelay.yaml")
	text, err := os.ReadFile(relay.ConfigFile)
	if err != nil {
		t.Fatal(err)
	}
	curl := filepath.Join(dir, ".curlrc")
	order := filepath.Join(dir, "order.json")
	for name, content := range map[string][]byte{config: text, curl: []byte("fail-with-body\nshow-error\nsilent\n"), order: []byte(`{"cents":1}`)} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(kit.Binary(t), filepath.Join(dir, "outrelay")); err != nil {
		t.Fatal(err)
	}
	address, _, _ = strings.Cut(strings.TrimSpace(address), " ")
	d := &desk{
		t: t, dir: dir,
		env:   append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "OUTRELAY_CONFIG="+config, "TOKEN="+token, "CURL_HOME="+dir),
		names: strings.NewReplacer("relay-2", relay.Node, "127.0.0.1:9465", address, "--topic audit", "--topic "+s.TopicOf("audit")),
	}

	// The reader has allowed the topic of the dead letters. Otherwise requeues are rejected.
	if page == "waiting.md" {
		d.env = append(d.env, "OUTRELAY_TOPICS_ALLOW=*")
	}

	// A dry run of setup ends with 0 only if nothing is missing, and the relay creates some indexes when they are needed.
	if out, err := d.runShell("outrelay setup"); err != nil {
		t.Fatalf("outrelay setup: %v\n%s", err, out)
	}
	return d
}

// appendWaiting appends events that are scheduled, wait for a topic, have failed, or become dead letters.
func appendWaiting(t *testing.T, s *kit.Scene) {
	t.Helper()
	// Kafka rejects the records of this topic as too old, also when they are sent again: a record of this size does not arrive within
	// the millisecond in which it got its time.
	const large = 500_000
	s.CreateTopic("payment", 1, 1, kafka.ConfigEntry{ConfigName: "message.timestamp.before.max.ms", ConfigValue: "0"})
	for i := range 20 {
		s.AppendEvents(s.Outbox(), kit.NewEvent("refund", "customer-17", i, 30), kit.NewEvent("payment", fmt.Sprint("customer-", i), i, large))
	}
	s.AppendEvents(s.Outbox(), kit.NewEvent("forbidden", "customer-18", 0, 30), kit.NewEvent("forbidden", "customer-19", 0, 30))
	s.Schedule("order", 4, 2, time.Now().Add(time.Hour), time.Minute)
	stacktest.Eventually(t, "parked, failed and dead events", func() bool {
		dead, err := s.State.Collection("letters").CountDocuments(t.Context(), bson.D{})
		return err == nil && dead == 2 && s.CountHeld("parked") > 0 && s.CountHeld("retry") > 5
	})
}

// giveUpMessages runs a consumer whose handler rejects the events of all orders, and which takes no event of another name.
func giveUpMessages(t *testing.T, s *kit.Scene) {
	t.Helper()
	s.AppendEvents(s.Outbox(), event.New(event.Aggregate{Type: "order", ID: "customer-20"}, "Renamed", event.JSON(1)))
	c, err := consumer.New("billing", s.DB, consumer.WithBrokers(s.Brokers...), consumer.WithTopics(s.TopicOf("order")),
		consumer.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}

	reject := func(context.Context, *consumer.Message) error { return consumer.Reject(errors.New("no such customer")) }
	if err := c.Handle("invoice", consumer.Func(reject, "Changed")); err != nil {
		t.Fatal(err)
	}

	ended := make(chan error, 1)
	go func() { ended <- c.Run(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Errorf("the consumer ended: %v", err)
		}
	})
	stacktest.Eventually(t, "dead letters of both classes", func() bool {
		rejected, err := s.DB.Collection("inbox_dead").CountDocuments(t.Context(), bson.D{{Key: "class", Value: "rejected"}})
		unknown, unknownErr := s.DB.Collection("inbox_dead").CountDocuments(t.Context(), bson.D{{Key: "class", Value: "unknown"}})
		return errors.Join(err, unknownErr) == nil && rejected >= 2 && unknown == 1
	})
}

// runStep runs a command as the reader does, who fills in ids and confirms changes. It fails the test if the command fails, or prints
// something else than the page.
func (d *desk) runStep(s step) {
	d.t.Helper()
	command := d.names.Replace(s.command)
	if group, _, ok := strings.Cut(strings.TrimPrefix(command, "outrelay "), " "); ok && placeholder.MatchString(command) {
		source := ""
		if strings.Contains(command, "--source handler") {
			source = "--source handler "
		} else if group == "dead" {
			source = "--source relay "
		}
		command = placeholder.ReplaceAllString(command, d.findID(group, source))
	}

	out, err := d.runShell(command)
	if err != nil && strings.Contains(out, "pass --yes to do it") {
		out, err = d.runShell(command + " --yes")
	}
	if err != nil {
		d.t.Errorf("$ %s: %v\n%s", command, err, out)
		return
	}
	for _, line := range s.output {
		if !containsShape(out, line) {
			d.t.Errorf("$ %s: no line like %q in\n%s", command, line, out)
		}
	}
}

var placeholder = regexp.MustCompile(`\bID(\.\.\.|\b)`)

// findID returns the id of the first entry in the list of a group of commands, such as dead. source is a flag of the list, or "".
func (d *desk) findID(group, source string) (id string) {
	d.t.Helper()
	if group != "lookup" {
		return d.findListed("outrelay " + group + " list " + source + "--json")
	}

	// An owner writes the list of delivered events every five seconds.
	stacktest.Eventually(d.t, "a delivered event", func() bool {
		id = d.findListed("outrelay topics recent --json")
		return id != "none"
	})
	return id
}

// findListed returns the first id in the list that a command prints, or none.
func (d *desk) findListed(command string) string {
	out, err := d.runShell(command)
	var list map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal([]byte(out), &list)
	}
	if err != nil {
		d.t.Errorf("%s: %v\n%s", command, err, out)
	}

	for _, raw := range list {
		var entries []struct {
			ID string `json:"id"`
		}
		if json.Unmarshal(raw, &entries) == nil && len(entries) > 0 && entries[0].ID != "" {
			return entries[0].ID
		}
	}
	return "none"
}

func (d *desk) runShell(command string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(d.t.Context(), kit.Patience, fmt.Errorf("not over after %v", kit.Patience))
	defer cancel()
	c := exec.CommandContext(ctx, "sh", "-euc", command)
	c.Dir, c.Env = d.dir, d.env
	// A program that the shell has started may keep the output open after the shell was killed.
	c.WaitDelay = 5 * time.Second
	out, err := c.CombinedOutput()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return string(out), err
}

// containsShape reports whether out has a line with the words of line in their order. Names, numbers and times may differ.
func containsShape(out, line string) bool {
	want := findWords(line)
	for text := range strings.Lines(out) {
		i := 0
		for _, w := range findWords(text) {
			if i < len(want) && w == want[i] {
				i++
			}
		}
		if i == len(want) {
			return true
		}
	}
	return false
}

// findWords returns the words of a line, of letters only, without the punctuation after them.
func findWords(line string) (words []string) {
	for _, w := range strings.Fields(line) {
		w = strings.TrimRight(w, ",:;")
		if strings.Trim(strings.ToLower(w), "abcdefghijklmnopqrstuvwxyz") == "" {
			words = append(words, w)
		}
	}
	return words
}

// The test distinguishes blocks that run from blocks that state why they do not run, and finds a mark without a block.
func TestConsoleBlocksAreFound(t *testing.T) {
	t.Parallel()
	page := filepath.Join(t.TempDir(), "page.md")
	text := "```console\n$ outrelay a   # why\nCOUNT  STATE\n3      dead\n$ outrelay b\n```\n\n<!-- not run: needs time -->\n```console\n$ outrelay c\n```\n\n1. In a list:\n\n    ```console\n    $ outrelay d\n    ```\n"
	if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	want := []block{
		{steps: []step{{"outrelay a", []string{"COUNT  STATE", "3      dead"}}, {"outrelay b", nil}}},
		{steps: []step{{"outrelay c", nil}}, reason: "needs time"},
		{steps: []step{{"outrelay d", nil}}},
	}

	if got := findBlocks(t, page); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("blocks %v, want %v", got, want)
	}
	if !containsShape("COUNT  STATE\n12  dead  x.y", "3      dead") || containsShape("COUNT  STATE\n", "COUNT  TOPIC") {
		t.Error("shapes of lines are not compared by their words")
	}
}
