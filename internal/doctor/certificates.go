package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/config"
)

// expiresSoon is the remaining time below which a certificate is a finding. Automatic renewals happen
// earlier.
const expiresSoon = 14 * 24 * time.Hour

// checkCertificates checks the expiry of the configured certificates and authorities.
func (x *examination) checkCertificates(context.Context) finding {
	worst := passed("no files of certificates are configured")
	for _, one := range []struct {
		key string
		tls *config.TLS
	}{{"mongodb.tls", x.cfg.MongoDB.TLS}, {"kafka.tls", x.cfg.Kafka.TLS}, {"otel.tls", x.cfg.OTel.TLS}} {
		end, file := one.tls.Expiry()
		if end.IsZero() {
			continue
		}

		left, when := time.Until(end), end.UTC().Format(time.DateTime)
		const fix = "replace the file; it is read again for the next connection, without a restart"
		switch {
		case left <= 0:
			return failed(fix, "%s: the certificate in %s expired at %s", one.key, file, when)
		case left < expiresSoon:
			worst = warned(fix, "%s: the certificate in %s expires at %s, in %s", one.key, file, when,
				formatDays(left))
		case worst.status == OK:
			worst = passed("valid until %s at least", when)
		}
	}
	return worst
}

func formatDays(d time.Duration) string {
	if d < 48*time.Hour {
		return d.Round(time.Hour).String()
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}
