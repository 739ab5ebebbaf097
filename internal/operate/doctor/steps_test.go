package doctor

import (
	"context"
	"strings"
	"testing"
	"time"
)

// If the time limit interrupts the request for the layout of the topics, no later check runs without the layout.
func TestNoCheckRunsAfterTheTimeLimit(t *testing.T) {
	t.Parallel()
	examination := &examination{limit: time.Minute, found: map[string]finding{}}
	examination.topics.names = []string{"orders"}
	topics := topicChecks{examination}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	examination.runSteps(ctx, []step{
		{id: "kafka", run: func(context.Context) finding { return passed("responds") }},
		// A broker that is slow for a minute: the request ends with the limit.
		{id: "topics.exist", needs: "kafka", run: func(context.Context) finding {
			cancel()
			finding := unchecked("", "Kafka returns: %v", ctx.Err())
			finding.root = "topics.exist"
			return finding
		}},
		{id: "topics.acl", needs: "kafka", run: topics.ifKnown(topics.checkACLs)},
	})
	if known := examination.findingOf("kafka"); known.status != OK {
		t.Errorf("before the limit: %+v", known)
	}
	for _, id := range []string{"topics.exist", "topics.acl"} {
		if late := examination.findingOf(id); late.status != Warn || !strings.Contains(late.detail, "the time limit of 1m0s is exceeded") {
			t.Errorf("%s: %+v", id, late)
		}
	}
}

// A check that could not be done, and prevents others, is printed with its reason and with the others.
func TestPrintOfACheckThatPreventsOthers(t *testing.T) {
	t.Parallel()
	report := Report{[]Check{
		{ID: "topics.exist", Status: Warn, Detail: "not checked because Kafka returns: timeout", Why: "because", root: "topics.exist"},
		{ID: "topics.acl", Status: Warn, Detail: "not checked because of topics.exist", root: "topics.exist"},
	}}
	var text strings.Builder
	if err := report.Print(&text); err != nil {
		t.Fatal(err)
	}

	want := "warn  topics.exist  not checked because Kafka returns: timeout\n" +
		"                    why  because\n" +
		"                    not checked: topics.acl\n" +
		"0 ok, 1 warning, 0 failed, 1 not checked\n"
	if text.String() != want {
		t.Errorf("\n%s\nwant\n%s", text.String(), want)
	}
}
