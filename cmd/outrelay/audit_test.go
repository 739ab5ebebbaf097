package main

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

func TestEventsCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	d.runCommand(nil, exitOK, "pause")
	log := nodes.NewAuditLog(d.state.Collection("audit"), "other", "far")
	if err := log.Append(t.Context(), nodes.GapFound, bson.D{{Key: "reason", Value: "two words"}, {Key: "code", Value: int32(286)}, {Key: "at", Value: bson.D{{Key: "t", Value: int32(1)}}}}); err != nil {
		t.Fatal(err)
	}

	var page admin.Page[admin.AuditEntry]
	d.runCommand(&page, exitOK, "audit")
	if page.Total != 4 || page.Items[0].Kind != "gap_found" || page.Items[3].Kind != "node_started" {
		t.Errorf("unexpected result %+v", page)
	}

	text := d.runCommand(nil, exitOK, "audit")
	expectTexts(t, text, `code=286 reason="two words"`, "node_started", "4 of 4 entries")
	if strings.Index(text, "node_started") > strings.Index(text, "gap_found") {
		t.Errorf("the entries are not in chronological order:\n%s", text)
	}

	for _, c := range []struct {
		args []string
		want []string // newest first
	}{
		{[]string{"--kind", "paused,gap_found"}, []string{"gap_found", "paused"}},
		{[]string{"--node", "two"}, []string{"node_started"}},
		{[]string{"--watcher", "default", "--limit", "2"}, []string{"paused", "node_started"}},
		{[]string{"--watcher", "other"}, []string{"gap_found"}},
		{[]string{"--from", "1h", "--kind", "paused"}, []string{"paused"}},
		{[]string{"--to", "1h"}, nil},
	} {
		d.runCommand(&page, exitOK, append([]string{"audit"}, c.args...)...)
		var got []string
		for _, e := range page.Items {
			got = append(got, e.Kind)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.args, got, c.want)
		}
	}

	d.runCommand(&page, exitOK, "audit", "--limit", "3")
	var rest admin.Page[admin.AuditEntry]
	d.runCommand(&rest, exitOK, "audit", "--limit", "3", "--after", page.Next)
	if len(page.Items) != 3 || len(rest.Items) != 1 || rest.Total != 4 {
		t.Errorf("unexpected results %+v and %+v", page, rest)
	}

	d.runCommand(&page, exitOK, "audit", "--kind", "paused")
	if e := page.Items[0]; e.Source != "cli" || e.Actor == "" {
		t.Errorf("unexpected result %+v", e)
	}

	d.runCommand(&page, exitOK, "audit", "--actor", firstEntry(page).Actor)
	if page.Total != 1 {
		t.Errorf("unexpected result %+v", page)
	}

	for _, args := range [][]string{{"--limit", "0"}, {"--limit", "1001"}, {"--from", "soon"}, {"--after", "x"}, {"--follow", "--to", "1h"}, {"trim"}} {
		d.runCommand(nil, exitConfig, append([]string{"audit"}, args...)...)
	}

	var trimmed trimmedAudit
	d.runCommand(&trimmed, exitOK, "audit", "trim", "--keep", "2", "--dry-run")
	if trimmed.Removed != 2 || !trimmed.DryRun {
		t.Errorf("unexpected result %+v", trimmed)
	}

	d.runCommand(&trimmed, exitOK, "audit", "trim", "--keep", "2", "--yes")
	d.runCommand(&page, exitOK, "audit")
	// The trim adds an entry.
	if trimmed.Removed != 2 || page.Total != 3 || page.Items[0].Kind != "audit_trimmed" {
		t.Errorf("unexpected results %+v and %+v", trimmed, page)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "audit", "trim", "--keep", "100"), "removed 0 entries")
}

func firstEntry(p admin.Page[admin.AuditEntry]) admin.AuditEntry { return p.Items[0] }

// textBuffer is a writer that a test can wait for.
type textBuffer struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func newTextBuffer() *textBuffer { return &textBuffer{more: make(chan struct{})} }

func (h *textBuffer) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.more)
	h.more = make(chan struct{})
	return h.buf.Write(p)
}

func (h *textBuffer) waitForText(t *testing.T, text string, times int) string {
	t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		h.mu.Lock()
		all, more := h.buf.String(), h.more
		h.mu.Unlock()

		if strings.Count(all, text) >= times {
			return all
		}

		select {
		case <-more:
		case <-deadline:
			t.Fatalf("waiting for %q (%d times) timed out; output:\n%s", text, times, all)
		}
	}
}

// startCommand starts a command that runs until its context ends. It returns its output, and end, which stops
// it and returns its exit code.
func (d *deployment) startCommand(args ...string) (out, errOut *textBuffer, end func() int) {
	out, errOut = newTextBuffer(), newTextBuffer()
	ctx, cancel := context.WithCancel(d.t.Context())
	code := make(chan int, 1)
	p := &program{in: strings.NewReader(""), out: out, errOut: errOut, env: d.env, exit: func(int) {}}
	go func() { code <- p.executeCommand(ctx, args) }()

	return out, errOut, func() int {
		cancel()
		select {
		case c := <-code:
			return c
		case <-time.After(60 * time.Second):
			d.t.Fatal("waiting for the end of the command timed out")
			return -1
		}
	}
}

func TestEventsAreFollowed(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	out, _, end := d.startCommand("audit", "--follow", "--json")
	people, _, endPeople := d.startCommand("audit", "--follow", "--kind", "paused")
	out.waitForText(t, "node_started", 2)
	d.runCommand(nil, exitOK, "pause")
	out.waitForText(t, `"kind":"paused"`, 1)
	d.runCommand(nil, exitOK, "resume")
	out.waitForText(t, `"kind":"resumed"`, 1)
	people.waitForText(t, "paused", 1)
	d.runCommand(nil, exitOK, "pause")
	all := out.waitForText(t, `"kind":"paused"`, 2)
	for _, line := range strings.Split(strings.TrimSpace(all), "\n") {
		var e admin.AuditEntry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Errorf("%v: %q", err, line)
		}
	}

	if n := strings.Count(all, "\n"); n != 5 {
		t.Errorf("%d entries, want 5:\n%s", n, all)
	}

	people.waitForText(t, "paused", 2)
	if code := end(); code != exitOK {
		t.Errorf("exit code %d, want 0", code)
	}
	if code := endPeople(); code != exitOK {
		t.Errorf("exit code %d, want 0", code)
	}
}
