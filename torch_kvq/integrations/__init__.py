"""Connections to other libraries; each module is imported only where its library is used."""
