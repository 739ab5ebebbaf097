package config

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// minTokenLength is the minimum number of characters of a token. A shorter one could be guessed within
// the allowed rate.
const minTokenLength = 12

var (
	// redactPathPattern matches the paths that internal/operate/admin supports.
	redactPathPattern  = regexp.MustCompile(`^\$(?:\.\.?[A-Za-z0-9_-]+|\[(?:\*|[0-9]{1,9})\])+$`)
	adminPrefixPattern = regexp.MustCompile("^" + pathForm + "$")
	headerNamePattern  = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
)

func (c *Config) validateAdmin(validator validator) {
	admin := c.HTTP.Admin
	if admin == nil {
		return
	}

	at := func(name string) string { return "http.admin." + name }
	// Port 0 selects a free port, so two such addresses differ.
	sameAddress := admin.Listen == c.HTTP.Listen && !strings.HasSuffix(admin.Listen, ":0")
	validator.check(at("listen"), isHostPort(admin.Listen) && !sameAddress || admin.IsOff(), strconv.Quote(admin.Listen),
		"expected host:port, other than http.listen, or off")
	validator.check(at("prefix"), admin.Prefix == "" || IsPrefix(admin.Prefix), strconv.Quote(admin.Prefix), PrefixRule)

	for _, t := range []struct {
		name  string
		token Secret
	}{{"token", admin.Token}, {"viewer_token", admin.ViewerToken}} {
		validator.check(at(t.name), t.token.IsZero() || len(t.token.Reveal()) >= minTokenLength, "a token that is too short",
			fmt.Sprintf("expected at least %d characters, such as the output of openssl rand -hex 32", minTokenLength))
	}
	// With equal tokens, a viewer could do everything.
	validator.check(at("viewer_token"), admin.ViewerToken.IsZero() || admin.ViewerToken.Reveal() != admin.Token.Reveal(), "the same as token",
		"expected another one, because the token decides the role")

	for _, problem := range admin.TLS.findProblems() {
		problem.Path = at("tls." + problem.Path)
		validator.reportFile(problem)
	}
	admin.Proxy.validate(validator, at("proxy."))

	validator.check(at("anonymous"), admin.Anonymous == "none" || admin.IsLocal(), admin.Anonymous,
		"only an address of this machine may be open to all clients; set token, tls.client_ca or proxy")
	canIdentify := !admin.Token.IsZero() || !admin.ViewerToken.IsZero() || admin.Proxy != nil || admin.TLS != nil && admin.TLS.ClientCA != ""
	// An invalid token is reported above; without it this problem would be a consequence. A service that mounts the page may
	// authorize its users itself.
	if !canIdentify && !admin.IsOff() && admin.Anonymous == "none" && !validator.hasProblem(at("token")) {
		validator.report("http.admin", "no client can log in",
			"set token (best as ${file:/path}), tls.client_ca or proxy, or on an address of this machine anonymous: viewer")
	}

	for i, name := range admin.Operators {
		_, err := path.Match(name, "")
		validator.check(fmt.Sprintf("%s[%d]", at("operators"), i), err == nil && name != "", strconv.Quote(name),
			"expected a name; * and ? are allowed")
	}
	for i, p := range admin.Redact.Paths {
		validator.check(fmt.Sprintf("%s[%d]", at("redact.paths"), i), redactPathPattern.MatchString(p), strconv.Quote(p),
			"expected a path such as $.card.number, $.items[*].price or $..password")
	}
	for i, h := range admin.Redact.Headers {
		_, err := path.Match(h, "")
		validator.check(fmt.Sprintf("%s[%d]", at("redact.headers"), i), err == nil && h != "", strconv.Quote(h),
			"expected the name of a header; * and ? are allowed")
	}
	validator.checkNumber(at("rate"), admin.Rate, 1, 10_000)
	validator.checkDuration(at("session"), admin.Session, 5*time.Minute, 30*24*time.Hour)
}

// PrefixRule states which texts [IsPrefix] accepts.
const PrefixRule = "expected a path such as /outrelay: it begins with a slash, ends without one, and has only letters, digits, and . _ ~ -"

// IsPrefix reports whether text is the path of a place at which a proxy or a service can serve the page.
func IsPrefix(text string) bool { return adminPrefixPattern.MatchString(text) }

// IsOff reports whether no listener serves the page and the API. A service that embeds the relay may mount them.
func (a *Admin) IsOff() bool { return a.Listen == "off" }

func (p *Proxy) validate(validator validator, prefix string) {
	if p == nil {
		return
	}

	validator.require(prefix+"header", p.Header == "", "set the header in which the proxy sends the name of the user")

	// Authorization is the header of the tokens.
	validHeader := headerNamePattern.MatchString(p.Header) && http.CanonicalHeaderKey(p.Header) != "Authorization"
	validator.check(prefix+"header", p.Header == "" || validHeader, strconv.Quote(p.Header),
		"expected the name of a header, such as X-Forwarded-User")

	validator.require(prefix+"from", len(p.From) == 0, "list the addresses of the proxy, such as 10.1.2.3 or 10.1.0.0/16: "+
		"every process there can state any user")
	for i, from := range p.From {
		_, err := parseNetwork(from)
		validator.check(fmt.Sprintf("%sfrom[%d]", prefix, i), err == nil, strconv.Quote(from),
			"expected an address or a network, such as 10.1.2.3 or 10.1.0.0/16")
	}
}

// Networks returns the networks of From.
func (p *Proxy) Networks() []netip.Prefix {
	var out []netip.Prefix
	for _, text := range p.From {
		if n, err := parseNetwork(text); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// parseNetwork parses an address or a network. An address is a network with one member.
func parseNetwork(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	return netip.ParsePrefix(text)
}

// IsLocal reports whether only this machine can reach the listener.
func (a *Admin) IsLocal() bool {
	host, _, err := net.SplitHostPort(a.Listen)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}

func (a *Admin) findWarnings() (warnings []string) {
	if a == nil {
		return nil
	}
	isOpen := !a.IsLocal() && !a.IsOff() && a.TLS == nil
	hasToken := !a.Token.IsZero() || !a.ViewerToken.IsZero()
	if isOpen && hasToken {
		warnings = append(warnings, "http.admin.listen is reachable from other machines without http.admin.tls: tokens are sent unencrypted, "+
			"unless a proxy adds TLS")
	}
	return warnings
}

// ServerConfig reads the files and returns the configuration of a TLS server. It returns nil for a nil ServerTLS.
func (t *ServerTLS) ServerConfig() (*tls.Config, error) {
	if t == nil {
		return nil, nil
	}
	// The files are checked together, so that one start reports every problem.
	if list := t.findProblems(); len(list) > 0 {
		return nil, &Problems{List: list}
	}

	pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, err
	}
	tlsConfig := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}

	if t.ClientCA != "" {
		if tlsConfig.ClientCAs, err = readCertPool(t.ClientCA); err != nil {
			return nil, err
		}
		// A client without a certificate may still have a token.
		tlsConfig.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return tlsConfig, nil
}

// findProblems returns the problems of the files. The paths are relative to the section.
func (t *ServerTLS) findProblems() (list []Problem) {
	if t == nil {
		return nil
	}
	if t.Cert == "" {
		list = append(list, Problem{Path: "cert", Found: "required and not set", Allowed: "set the file with the certificate"})
	}
	if t.Key == "" {
		list = append(list, Problem{Path: "key", Found: "required and not set", Allowed: "set the file with the private key"})
	}

	pair := &TLS{CA: t.ClientCA}
	if len(list) == 0 {
		pair.Cert, pair.Key = t.Cert, t.Key
	}
	for _, problem := range pair.findProblems() {
		if problem.Path == "ca" {
			problem.Path = "client_ca"
		}
		list = append(list, problem)
	}
	return list
}
