package opspage

import (
	"html/template"
	"net/http"
	"net/url"
)

// LoginForm returns a function that shows the form of the login of a page below prefix: see httpapi.AdminOptions.
func LoginForm(prefix string) func(response http.ResponseWriter, request *http.Request, status int, problem, next string) {
	base := base(prefix)
	form := loadTemplates(loadAssets(base))["login"]
	return func(response http.ResponseWriter, request *http.Request, status int, problem, next string) {
		action := base.address("/login")
		if next != "/" {
			action += "?next=" + url.QueryEscape(next)
		}
		withHeaders(http.HandlerFunc(func(response http.ResponseWriter, _ *http.Request) {
			renderLogin(response, form, status, problem, action)
		})).ServeHTTP(response, request)
	}
}

func renderLogin(response http.ResponseWriter, form *template.Template, status int, problem, action string) {
	response.Header().Set("Content-Type", "text/html; charset=utf-8")
	response.WriteHeader(status)
	// An error means that the client has disconnected.
	_ = form.ExecuteTemplate(response, "login", struct{ Problem, Action string }{problem, action})
}
