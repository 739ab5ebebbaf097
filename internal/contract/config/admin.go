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
	redactPathPattern = regexp.MustCompile(`^\$(?:\.\.?[A-Za-z0-9_-]+|\[(?:\*|[0-9]{1,9})\])+$`)
	headerNamePattern = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
)

func (c *Config) validateAdmin(v validator) {
	a := c.HTTP.Admin
	if a == nil {
		return
	}

	at := func(name string) string { return "http.admin." + name }
	// Port 0 selects a free port, so two such addresses differ.
	sameAddress := a.Listen == c.HTTP.Listen && !strings.HasSuffix(a.Listen, ":0")
	v.check(at("listen"), isHostPort(a.Listen) && !sameAddress, strconv.Quote(a.Listen), "expected host:port, other than http.listen")

	for _, t := range []struct {
		name  string
		token Secret
	}{{"token", a.Token}, {"viewer_token", a.ViewerToken}} {
		v.check(at(t.name), t.token.IsZero() || len(t.token.Reveal()) >= minTokenLength, "a token that is too short",
			fmt.Sprintf("expected at least %d characters, such as the output of openssl rand -hex 32", minTokenLength))
	}
	// With equal tokens, a viewer could do everything.
	v.check(at("viewer_token"), a.ViewerToken.IsZero() || a.ViewerToken.Reveal() != a.Token.Reveal(), "the same as token",
		"expected another one, because the token decides the role")

	for _, problem := range a.TLS.findProblems() {
		v.report(at("tls."+problem.Path), problem.Found, problem.Allowed)
	}
	a.Proxy.validate(v, at("proxy."))

	v.check(at("anonymous"), a.Anonymous == "none" || a.IsLocal(), a.Anonymous,
		"only an address of this machine may be open to all clients; set token, tls.client_ca or proxy")
	canIdentify := !a.Token.IsZero() || !a.ViewerToken.IsZero() || a.Proxy != nil || a.TLS != nil && a.TLS.ClientCA != ""
	// An invalid token is reported above; without it this problem would be a consequence.
	if !canIdentify && a.Anonymous == "none" && !v.hasProblem(at("token")) {
		v.report("http.admin", "no client can log in",
			"set token (best as ${file:/path}), tls.client_ca or proxy, or on an address of this machine anonymous: viewer")
	}

	for i, name := range a.Operators {
		_, err := path.Match(name, "")
		v.check(fmt.Sprintf("%s[%d]", at("operators"), i), err == nil && name != "", strconv.Quote(name),
			"expected a name; * and ? are allowed")
	}
	for i, p := range a.Redact.Paths {
		v.check(fmt.Sprintf("%s[%d]", at("redact.paths"), i), redactPathPattern.MatchString(p), strconv.Quote(p),
			"expected a path such as $.card.number, $.items[*].price or $..password")
	}
	for i, h := range a.Redact.Headers {
		_, err := path.Match(h, "")
		v.check(fmt.Sprintf("%s[%d]", at("redact.headers"), i), err == nil && h != "", strconv.Quote(h),
			"expected the name of a header; * and ? are allowed")
	}
	v.checkNumber(at("rate"), a.Rate, 1, 10_000)
	v.checkDuration(at("session"), a.Session, 5*time.Minute, 30*24*time.Hour)
}

func (p *Proxy) validate(v validator, prefix string) {
	if p == nil {
		return
	}

	v.require(prefix+"header", p.Header == "", "set the header in which the proxy sends the name of the user")

	// Authorization is the header of the tokens.
	validHeader := headerNamePattern.MatchString(p.Header) && http.CanonicalHeaderKey(p.Header) != "Authorization"
	v.check(prefix+"header", p.Header == "" || validHeader, strconv.Quote(p.Header),
		"expected the name of a header, such as X-Forwarded-User")

	v.require(prefix+"from", len(p.From) == 0, "list the addresses of the proxy, such as 10.1.2.3 or 10.1.0.0/16: "+
		"every process there can state any user")
	for i, from := range p.From {
		_, err := parseNetwork(from)
		v.check(fmt.Sprintf("%sfrom[%d]", prefix, i), err == nil, strconv.Quote(from),
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

func (a *Admin) findWarnings() (w []string) {
	if a == nil {
		return nil
	}
	isOpen := !a.IsLocal() && a.TLS == nil
	hasToken := !a.Token.IsZero() || !a.ViewerToken.IsZero()
	if isOpen && hasToken {
		w = append(w, "http.admin.listen is reachable from other machines without http.admin.tls: tokens are sent unencrypted, "+
			"unless a proxy adds TLS")
	}
	return w
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
	c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}

	if t.ClientCA != "" {
		if c.ClientCAs, err = readCertPool(t.ClientCA); err != nil {
			return nil, err
		}
		// A client without a certificate may still have a token.
		c.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return c, nil
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
