package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// configChecks check the configuration and its files, without a connection.
type configChecks struct{ *examination }

// checkSizes finds limits that contradict each other.
func (x configChecks) checkSizes(context.Context) finding {
	limits := x.cfg.Limits
	if limits.Envelope > limits.Memory {
		return warned(fmt.Sprintf("raise limits.memory to at least four times limits.envelope, %s", 4*limits.Envelope),
			"limits.envelope, %s, is above limits.memory, %s: the relay sends such an envelope alone", limits.Envelope, limits.Memory)
	}
	return passed("limits.envelope is %s, limits.memory is %s", limits.Envelope, limits.Memory)
}

// checkAllowedTopics checks whether the topics that envelopes may name are restricted.
func (x configChecks) checkAllowedTopics(context.Context) finding {
	if len(x.cfg.Topics.Allow) == 0 {
		maker := roleMaker{cfg: x.cfg}
		var meant []string
		for _, t := range maker.topicPatterns() {
			// A template that begins with a field of the envelope does not restrict the topic.
			if t.name == "*" {
				continue
			}
			meant = append(meant, strconv.Quote(t.name+map[string]string{"prefixed": "*"}[t.pattern]))
		}

		fix := "list the topics for events in topics.allow"
		if len(meant) > 0 {
			fix += fmt.Sprintf("; topics.template and topics.rules use: [%s]", strings.Join(meant, ", "))
		}
		const open = "topics.allow is not set: an envelope may name any topic except Kafka's internal topics"
		// Each takeover allows topics.max new topics again, and topics that were created stay.
		if x.cfg.Topics.Create != nil {
			return failed(fix, "%s, and because of topics.create the relay creates each of these topics", open)
		}
		return warned(fix, open)
	}
	return passed("%s", joinFew(x.cfg.Topics.Allow, namesMost))
}

// expiresSoon is the remaining time below which a certificate is a finding. Automatic renewals happen
// earlier.
const expiresSoon = 14 * 24 * time.Hour

// checkCertificates checks the expiry of the configured certificates and authorities.
func (x configChecks) checkCertificates(context.Context) finding {
	worst := passed("no certificate files are configured")
	for _, one := range []struct {
		key string
		tls *config.TLS
	}{{"mongodb.tls", x.cfg.MongoDB.TLS}, {"kafka.tls", x.cfg.Kafka.TLS}, {"otel.tls", x.cfg.OTel.TLS}} {
		end, file := one.tls.Expiry()
		if end.IsZero() {
			continue
		}

		left, when := time.Until(end), end.UTC().Format(time.DateTime)
		const fix = "replace the file; the next connection reads it again, without a restart"
		switch {
		case left <= 0:
			return failed(fix, "%s: the certificate in %s expired at %s", one.key, file, when)
		case left < expiresSoon:
			worst = warned(fix, "%s: the certificate in %s expires at %s, in %s", one.key, file, when,
				formatDays(left))
		// A warning stays, even if the next certificate is valid.
		case worst.status == OK:
			worst = passed("valid at least until %s", when)
		}
	}
	return worst
}

func formatDays(duration time.Duration) string {
	if duration < 48*time.Hour {
		return duration.Round(time.Hour).String()
	}
	return fmt.Sprintf("%d days", int(duration.Hours()/24))
}
