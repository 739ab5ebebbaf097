package httpapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/probes"
)

const maxActor = 128 // bytes of a name in the events log

func itoa(n int) string { return strconv.Itoa(n) }

// caller says who sends r; the text is why nobody is known. Names from the proxy come first, because a proxy may have a
// certificate of its own.
func (a *Access) caller(r *http.Request) (admin.Caller, string) {
	if a.isProxy(r) {
		switch names := r.Header.Values(a.ProxyHeader); {
		case len(names) == 1 && names[0] != "":
			return a.known(r, names[0], "proxy", a.role(names[0]))
		case len(names) == 0 && r.Header.Get("Authorization") != "":
			return a.fromToken(r)
		}
		// The proxy's own certificate says nothing about the person behind it.
		return admin.Caller{}, "the proxy did not name exactly one person in " + a.ProxyHeader
	}
	if name, ok := fromCertificate(r); ok {
		return a.known(r, name, "certificate", a.role(name))
	}
	if r.Header.Get("Authorization") != "" {
		return a.fromToken(r)
	}
	if a.Anonymous == admin.RoleViewer || a.Anonymous == admin.RoleOperator {
		return a.known(r, "anonymous", "anonymous", a.Anonymous)
	}
	return admin.Caller{}, "nobody is logged in"
}

func (a *Access) known(r *http.Request, name, by, role string) (admin.Caller, string) {
	if !printable(name) {
		return admin.Caller{}, "the name of the caller is empty, too long or not printable"
	}
	way := "page"
	if isAPI(r) {
		way = "api"
	}
	c := admin.Caller{Actor: admin.Actor{Name: name, Source: way + "/" + by}, Role: role}
	c.Payloads = a.Payloads == admin.RoleViewer || a.Payloads == admin.RoleOperator && c.Operator()
	return c, ""
}

func printable(name string) bool {
	return name != "" && len(name) <= maxActor && utf8.ValidString(name) && strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

// role is that of a name which somebody else vouches for.
func (a *Access) role(name string) string {
	for _, p := range a.Operators {
		if ok, _ := path.Match(p, name); ok || p == name {
			return admin.RoleOperator
		}
	}
	return admin.RoleViewer
}

// isProxy reports whether the trusted proxy sends the request.
func (a *Access) isProxy(r *http.Request) bool {
	from := remoteIP(r)
	return a.ProxyHeader != "" && slices.ContainsFunc(a.ProxyFrom, func(p netip.Prefix) bool { return p.Contains(from) })
}

// client is the name under which the requests of a caller are counted. Whoever has a token chooses the name beside it, so
// only the token counts.
func client(r *http.Request, c admin.Caller) string {
	who := c.Actor.Name
	if strings.HasSuffix(c.Actor.Source, "/token") {
		who = c.Role
	}
	return remoteIP(r).String() + " " + c.Actor.Source + " " + who
}

func fromCertificate(r *http.Request) (string, bool) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return "", false
	}
	name := r.TLS.VerifiedChains[0][0].Subject.CommonName
	return name, name != ""
}

// fromToken knows whoever shows a token. The name beside it, in a browser's login, is what the person says.
func (a *Access) fromToken(r *http.Request) (admin.Caller, string) {
	name, shown, ok := r.BasicAuth()
	if !ok {
		var scheme string
		scheme, shown, ok = strings.Cut(r.Header.Get("Authorization"), " ")
		name, ok = "token", ok && strings.EqualFold(scheme, "Bearer")
		shown = strings.TrimSpace(shown)
	}
	if name == "" {
		name = "token"
	}
	// Both are compared whatever the first one says, and hashed before: neither equality nor length shows in the time.
	operator, viewer := same(shown, a.Token), same(shown, a.ViewerToken)
	switch {
	case ok && operator:
		return a.known(r, name, "token", admin.RoleOperator)
	case ok && viewer:
		return a.known(r, name, "token", admin.RoleViewer)
	}
	return admin.Caller{}, "the token is not one of this listener's"
}

func same(shown, token string) bool {
	x, y := sha256.Sum256([]byte(shown)), sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1 && token != ""
}

// named reports whether the listener may be called by that name. A web page can have a name of its own resolve to this
// machine; then its requests come from here and are of the same origin.
func (a *Access) named(host string) bool {
	if !a.Local {
		return true
	}
	name := probes.HostName(host)
	if name == "localhost" || slices.ContainsFunc(a.Hosts, func(h string) bool { return strings.EqualFold(h, name) }) {
		return true
	}
	addr, err := netip.ParseAddr(name)
	return err == nil && addr.IsLoopback()
}

// remoteIP is the address of whoever is connected; the zero value where there is none.
func remoteIP(r *http.Request) netip.Addr {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return at.Addr().Unmap().WithZone("")
}
