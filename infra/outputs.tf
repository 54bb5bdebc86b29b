output "hosts" {
  description = "What goes into the inventory: public address for SSH, private address of the measured path."
  value = {
    for name, host in aws_instance.host : name => {
      public_address = host.public_ip
      address        = host.private_ip
    }
  }
}
