package config

import (
	"fmt"
	"os"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// findWarnings returns warnings about settings that are valid but weaken the protection.
func (c *Config) findWarnings() (warnings []string) {
	warnings = append(warnings, c.HTTP.Admin.findWarnings()...)

	endpoint := c.OTel.Endpoint.Reveal()
	if strings.HasPrefix(endpoint, "http://") && (!c.OTel.Token.IsZero() || strings.Contains(endpoint, "@")) {
		warnings = append(warnings, "otel.endpoint is http with a token or a login: they are sent unencrypted")
	}

	for _, section := range []struct {
		path string
		tls  *TLS
	}{{"mongodb.tls", c.MongoDB.TLS}, {"kafka.tls", c.Kafka.TLS}} {
		if section.tls == nil {
			continue
		}
		if section.tls.Insecure {
			warnings = append(warnings, section.path+".insecure accepts any certificate: an attacker in the network can read and change the traffic")
		}
		warnings = append(warnings, warnIfReadableByAll(section.path+".key", section.tls.Key)...)
	}
	if admin := c.HTTP.Admin; admin != nil && admin.TLS != nil {
		warnings = append(warnings, warnIfReadableByAll("http.admin.tls.key", admin.TLS.Key)...)
	}

	uri := strings.ToLower(c.MongoDB.URI.Reveal())
	if strings.Contains(uri, "tlsinsecure=true") || strings.Contains(uri, "tlsallowinvalid") {
		warnings = append(warnings, "mongodb.uri accepts any certificate: an attacker in the network can read and change the traffic")
	}
	if sasl := c.Kafka.SASL; sasl != nil && c.Kafka.TLS == nil && sendsClear(sasl.Mechanism) {
		warnings = append(warnings, "kafka.sasl.mechanism is "+sasl.Mechanism+" without kafka.tls: the login is sent unencrypted")
	}
	return warnings
}

// sendsClear reports whether a mechanism sends its password or token as it is.
func sendsClear(mechanism string) bool {
	m, _ := sasl.Find(mechanism)
	return m.Clear
}

// warnIfReadableByAll returns a warning if every user of this machine may read the private key.
func warnIfReadableByAll(path, file string) []string {
	info, err := os.Stat(file)
	if file == "" || err != nil || info.Mode().Perm()&0o004 == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s: every user of this machine may read %s; to prevent this, run chmod o-r", path, file)}
}
