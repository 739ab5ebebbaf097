package admin

import (
	"fmt"
	"time"
)

// Limits of the health rules.
const (
	failedPolls  = 3           // in a row make what was a warning a failure
	deadPerSpan  = 100         // new dead letters within deadSpan are a warning
	deadSpan     = time.Minute //
	notFallingIn = 3           // evaluations in a row at which something waits and does not become less
)

// health holds what the rules compare. The first evaluation only sets the baseline: a backlog that was there before says
// nothing of how things go.
type health struct {
	failed  int // counts in a row that failed
	reason  error
	samples []healthSample // of the last deadSpan, and one before
	stuck   int            // evaluations in a row at which something waited and was not less
}

type healthSample struct {
	at            time.Time
	waiting, dead int64
}

// observe evaluates the rules with what was counted at that time.
func (h *health) observe(at time.Time, err error, waiting, dead int64) {
	if err != nil {
		h.failed, h.reason = h.failed+1, err
		return
	}
	h.failed, h.reason = 0, nil
	if n := len(h.samples); n > 0 {
		if waiting > 0 && waiting >= h.samples[n-1].waiting {
			h.stuck++
		} else {
			h.stuck = 0
		}
	}
	h.samples = append(h.samples, healthSample{at, waiting, dead})
	for len(h.samples) > 2 && at.Sub(h.samples[1].at) >= deadSpan {
		h.samples = h.samples[1:]
	}
}

// growth is how many dead letters came within about the last minute.
func (h *health) growth() int64 {
	if len(h.samples) < 2 {
		return 0
	}
	return h.samples[len(h.samples)-1].dead - h.samples[0].dead
}

func (h *health) checks() []Check {
	counts := Check{ID: "figures", Status: CheckOK, Detail: "what waits can be counted"}
	switch {
	case h.failed >= failedPolls:
		counts.Status, counts.Detail, counts.Fix = CheckFail, fmt.Sprintf("what waits could not be counted %d times in a row: %v", h.failed, h.reason), "look at MongoDB and at the privileges of the relay's user (outrelay doctor)"
	case h.failed > 0:
		counts.Status, counts.Detail = CheckWarn, fmt.Sprintf("what waits could not be counted: %v", h.reason)
	}
	dead := Check{ID: "dead_letters", Status: CheckOK, Detail: fmt.Sprintf("%d new within a minute", max(h.growth(), 0))}
	if h.growth() >= deadPerSpan {
		dead.Status, dead.Fix = CheckWarn, "outrelay dead summary --since 10m says why they die"
	}
	waiting := Check{ID: "waiting", Status: CheckOK, Detail: "nothing waits"}
	if n := len(h.samples); n > 0 && h.samples[n-1].waiting > 0 {
		waiting.Detail = fmt.Sprintf("%d envelopes wait", h.samples[n-1].waiting)
		if h.stuck >= notFallingIn {
			waiting.Status, waiting.Fix = CheckWarn, "outrelay waiting summary says for which topic and since when"
			waiting.Detail += fmt.Sprintf(", and have not become fewer at %d evaluations in a row", h.stuck)
		}
	}
	return []Check{counts, dead, waiting}
}
